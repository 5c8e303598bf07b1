"""On releases that `tests/models` does not run on: the architectures accepted there give the tokens of dense decode."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import assert_same_answers
from random_model import write_random_model

from sglang_sparse import sglang_compat
from sglang_sparse.support import ARCHITECTURES_OF_ALL_RELEASES

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(sglang_compat.has_tested_models(), reason="tests/models runs them and more"),
]

# Llama is what the other server tests run. Group sizes of real models: Qwen2.5-0.5B has 7 query heads a KV head.
SHAPES = {
    "MistralForCausalLM": {"heads": 4, "kv_heads": 4},
    "Qwen2ForCausalLM": {"heads": 7, "kv_heads": 1, "hidden": 448},
    "Qwen3ForCausalLM": {"heads": 4, "kv_heads": 2, "head_dim": 128},
}


def test_every_accepted_architecture_is_tested() -> None:
    assert {"LlamaForCausalLM", *SHAPES} == set(ARCHITECTURES_OF_ALL_RELEASES)


@pytest.mark.parametrize("architecture", SHAPES)
def test_rule_all_equals_dense(start_server: Any, tmp_path: Path, architecture: str) -> None:
    model = write_random_model(tmp_path, architecture=architecture, **SHAPES[architecture])
    sparse_flags = ("--sparse-decode", "--sparse-decode-rule", "all")
    with ThreadPoolExecutor(2) as pool:
        dense, sparse = pool.map(lambda flags: start_server(model, *flags), ((), sparse_flags))
    generator = random.Random(5)
    prompts = [[generator.randrange(256) for _ in range(length)] for length in (20, 130, 700)]
    try:
        for prompt in prompts:
            # With margins, so that a difference says whether the model was sure.
            assert_same_answers([sparse.generate(prompt, 16)], [dense.generate(prompt, 16, margins=True)])
    finally:
        dense.stop()
        sparse.stop()
