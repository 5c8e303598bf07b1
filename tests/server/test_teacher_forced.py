"""On a GPU rounding differs between kernels: with rule `all`, each decode step, given the dense answer so far, picks
the token that dense decode picks wherever dense decode is sure."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import pytest
from test_smollm2 import document

pytestmark = [pytest.mark.server, pytest.mark.gpu]

TOKENS = 24
MARGIN = 0.5
SPARSE = ("--sparse-decode", "--sparse-decode-min-context", "512", "--sparse-decode-rule", "all")
COMMON = ("--cuda-graph-bs-decode", "1", "2", "4")


def second_token(server: harness.Server, prompt: list[int]) -> tuple[int, int, float]:
    """The token that prefill picks, the one the decode step after it picks, and that step's margin in nats."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    response = server.post("/generate", body)
    response.raise_for_status()
    answer = response.json()
    best, second = answer["meta_info"]["output_top_logprobs"][1][:2]
    return (*answer["output_ids"], best[0] - second[0])


def test_each_step_picks_the_token_of_dense_where_dense_is_sure(start_server: Any, smollm2: Path) -> None:
    from transformers import AutoTokenizer

    with ThreadPoolExecutor(2) as pool:
        dense, sparse = pool.map(lambda flags: start_server(smollm2, *flags), (COMMON, (*COMMON, *SPARSE)))
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    compared = 0
    for length in (100, 700, 1500, 3000):
        prompt = tokenizer(document(length)).input_ids
        answer = dense.generate(prompt, TOKENS)["output_ids"]
        for step in range(TOKENS - 1):
            forced = prompt + answer[:step]
            expected, got = second_token(dense, forced), second_token(sparse, forced)
            if expected[0] == got[0] and expected[2] > MARGIN:
                compared += 1
                assert got[1] == expected[1], (length, step, expected, got)
    assert compared > TOKENS
    info = sparse.sparse_info()
    assert info["kept_fraction"] == 1
    assert info["steps"] >= compared
