"""A model of layers with and without a sliding window, served: chunks, shared prefixes, several requests at once."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint

from sglang_sparse import sglang_compat

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not sglang_compat.has_tested_models(), reason="refused on this SGLang release"),
]

FULL_LAYERS = [1, 2]
SPARSE = ("--sparse-decode", "--sparse-decode-gamma", "1", "--sparse-decode-min-context", "64")
CHUNKS = ("--chunked-prefill-size", "256")


def test_gamma_one_equals_dense(start_server: Any, tmp_path: Path) -> None:
    model = write_checkpoint(
        tmp_path / "gemma3",
        "gemma3_text",
        embedding=0.25,
        num_hidden_layers=4,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    )
    with ThreadPoolExecutor(2) as pool:
        dense, sparse = pool.map(lambda flags: start_server(model, *flags, *CHUNKS), ((), SPARSE))
    generator = random.Random(5)
    prompts = [[generator.randrange(3, 256) for _ in range(length)] for length in (20, 130, 700)]
    prompts.append(prompts[-1][:500] + prompts[1])
    try:
        expected = [dense.generate(prompt, 16)["output_ids"] for prompt in prompts]
        assert len({tuple(answer) for answer in expected}) == len(prompts), "answers that do not depend on the prompt"
        answers = [*sparse.generate_many(prompts[:3], 16, at_once=3), sparse.generate(prompts[3], 16)]
        assert [answer["output_ids"] for answer in answers] == expected
        assert answers[3]["meta_info"]["cached_tokens"] == 448
        info = sparse.idle_info()
    finally:
        dense.stop()
        sparse.stop()
    assert info["kept_fraction"] == 1
    layers = info["kept_fraction_by_layer_and_head"]
    assert [number for number, heads in enumerate(layers) if heads] == FULL_LAYERS
    assert info["self_check"]["live_closed_pages"] > 10
    assert info["self_check"]["stale_pages"] == 0
