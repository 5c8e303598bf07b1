"""Rule top-delta in a running server, by way of block lists and in the fused pass."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import requests

pytestmark = pytest.mark.server

FLAGS = (
    *("--sparse-decode", "--sparse-decode-rule", "top-delta", "--sparse-decode-delta", "0.3"),
    *("--sparse-decode-min-context", "128", "--sparse-decode-window-tokens", "16", "--sparse-decode-audit-rate", "1"),
)
TOKENS = 16


def test_both_paths_answer_the_same_and_obey_delta(start_server: Any, random_llama: Path) -> None:
    generator = random.Random(3)
    prompts = [[generator.randrange(256) for _ in range(length)] for length in (700, 90, 1100, 300)]
    answers, infos = [], []
    for path in ("fused", "lists"):
        server = start_server(random_llama, *FLAGS, "--sparse-decode-path", path)
        answers.append([answer["output_ids"] for answer in server.generate_many(prompts, TOKENS, at_once=2)])
        infos.append(server.sparse_info())
        assert f"rule top-delta, path {path}" in server.log.read_text()
        # A request may ask for more, and the server for everything.
        params = {"custom_params": {"sparse_decode": {"delta": 1000}}}
        own = server.generate(prompts[0], TOKENS, **params)
        assert own["meta_info"]["sparse_decode"]["kept_fraction"] == 1
        changed = requests.post(f"{server.url}/sparse_decode", json={"delta": 1000}, timeout=60).json()
        assert changed["control"]["delta"] == 1000
        assert server.generate(prompts[0], TOKENS)["meta_info"]["sparse_decode"]["kept_fraction"] == 1
    assert answers[0] == answers[1]
    for name in ("kept_fraction", "bytes_read_fraction"):
        assert infos[0][name] == pytest.approx(infos[1][name], abs=0.01)
    assert 0.1 < infos[0]["kept_fraction"] < 0.95
    assert infos[0]["options"]["delta"] == 0.3
    for info in infos:
        by_layer = info["audit"]["by_layer"]
        assert by_layer
        assert all(0.1 < layer["mean"] < 1 for layer in by_layer.values())


def test_preset_ffd_is_served(start_server: Any, random_llama: Path) -> None:
    generator = random.Random(4)
    prompts = [[generator.randrange(256) for _ in range(length)] for length in (500, 260)]
    flags = ("--sparse-decode-preset", "ffd", "--sparse-decode-delta", "0.3", "--sparse-decode-min-context", "128")
    server = start_server(random_llama, "--sparse-decode", *flags, "--sparse-decode-window-tokens", "16")
    # The fused pass where a GPU has programs enough, lists elsewhere.
    assert re.search(
        r"estimator ffd, rule top-delta, path .*lists \(chosen by auto\), tail drop", server.log.read_text()
    )
    answers = server.generate_many(prompts, TOKENS, at_once=2)
    assert all(len(answer["output_ids"]) == TOKENS for answer in answers)
    info = server.sparse_info()
    assert (info["options"]["estimator"], info["options"]["thumbnail_bits"]) == ("ffd", 2)
    assert 0 < info["kept_fraction"] <= 1
