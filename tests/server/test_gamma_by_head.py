"""A config's gamma for each KV head in a running server."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.server


def test_each_head_reads_what_its_gamma_asks_for(start_server: Any, random_llama: Path, tmp_path: Path) -> None:
    by_head = [[0.2, 1.0], [0.9, 0.3]]
    config = tmp_path / "config.json"
    options = {"gamma_by_head": by_head, "min_context": 128, "sink_tokens": 0, "window_tokens": 16, "page_size": 32}
    config.write_text(json.dumps({**options, "audit_rate": 1}))
    server = start_server(random_llama, "--sparse-decode", "--sparse-decode-config", str(config))
    generator = random.Random(3)
    prompts = [[generator.randrange(256) for _ in range(length)] for length in (700, 300, 1100)]
    server.generate_many(prompts, 16, at_once=2)
    info = server.sparse_info()
    assert info["options"]["gamma_by_head"] == by_head
    assert info["page_size"] == 32
    kept = info["kept_fraction_by_layer_and_head"]
    assert kept[0][1] == 1
    assert 0 < kept[0][0] < kept[1][0] < 1
    assert 0 < kept[1][1] < kept[1][0]
    # The audit weighs a layer's heads together: coverage lies near the mean of what they were asked for.
    for layer, gammas in zip(("0", "1"), by_head, strict=True):
        assert info["audit"]["by_layer"][layer]["mean"] == pytest.approx(sum(gammas) / 2, abs=0.1)
