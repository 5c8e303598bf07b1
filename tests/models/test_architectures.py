"""Each model architecture that is accepted: with rule `all`, tokens are those of dense decode."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_adapter, write_checkpoint

from sglang_sparse import cpu, sglang_compat
from sglang_sparse.support import TESTED_ARCHITECTURES

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs models on a CPU"),
    pytest.mark.skipif(not sglang_compat.has_tested_models(), reason="written for another SGLang release"),
]

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWS = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]}

# Llama is what the server tests run. Group sizes and head dims differ, as they do in real models.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"model_type": "mistral", "num_key_value_heads": 4},
    "Ministral3ForCausalLM": {"model_type": "ministral3"},
    # Qwen2.5-0.5B has 7 query heads a KV head.
    "Qwen2ForCausalLM": {
        "model_type": "qwen2",
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 448,
    },
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 128},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "MixtralForCausalLM": {"model_type": "mixtral", "sliding_window": None, **EXPERTS},
    "OlmoeForCausalLM": {
        "model_type": "olmoe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
    },
    "GraniteMoeForCausalLM": {"model_type": "granitemoe", **EXPERTS},
    "Glm4MoeForCausalLM": {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    # Phi-3-mini has head dim 96. Its config names a window that SGLang leaves alone.
    "Phi3ForCausalLM": {
        "model_type": "phi3",
        "hidden_size": 384,
        "num_key_value_heads": 4,
        "head_dim": 96,
        "sliding_window": 100,
    },
    "GemmaForCausalLM": {"model_type": "gemma", "embedding": 0.25, "head_dim": 256},
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        "embedding": 0.25,
        "num_hidden_layers": 4,
        "head_dim": 256,
        "num_key_value_heads": 1,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    },
    "CohereForCausalLM": {"model_type": "cohere", "embedding": 1.0},
    "Cohere2ForCausalLM": {"model_type": "cohere2", "embedding": 1.0, **WINDOWS},
    "GraniteForCausalLM": {"model_type": "granite"},
    "Olmo2ForCausalLM": {"model_type": "olmo2"},
    "Starcoder2ForCausalLM": {"model_type": "starcoder2", "sliding_window": None},
    "StableLmForCausalLM": {"model_type": "stablelm"},
    "Glm4ForCausalLM": {"model_type": "glm4"},
    "ArceeForCausalLM": {"model_type": "arcee"},
    "ApertusForCausalLM": {"model_type": "apertus"},
}
FULL_LAYERS = {"Gemma3ForCausalLM": [1, 2], "Cohere2ForCausalLM": [1]}
"""Layers without a sliding window, where not all are."""

# Runs of a model of the table that differ in the server's arguments.
HALF, ADAPTER = "Qwen3ForCausalLM in float16", "Qwen3ForCausalLM with an adapter"
VARIANTS = (HALF, ADAPTER)

PROMPT_LENGTHS = (20, 130, 700)
TOKENS = 12
MODES: dict[str, dict[str, Any]] = {
    "dense": {"sparse": None, "flags": []},
    "all": {"sparse": {"rule": "all"}, "flags": ["--sparse-decode", "--sparse-decode-rule", "all"]},
    "coverage": {
        "sparse": {"gamma": 0.5, "min_context": 64},
        "flags": ["--sparse-decode", "--sparse-decode-gamma", "0.5", "--sparse-decode-min-context", "64"],
    },
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `model_process.py` says of each model in each mode."""
    folder = tmp_path_factory.mktemp("models")
    models: dict[str, dict[str, Any]] = {}
    for name, config in CHECKPOINTS.items():
        path = write_checkpoint(folder / name, **config)
        models[name] = {"path": str(path), "flags": ["--dtype", "float32"], "adapter": None}
    qwen3, shape = models["Qwen3ForCausalLM"], {"q_proj": 512, "k_proj": 256, "v_proj": 256, "o_proj": 256}
    adapter = write_adapter(folder / "adapter", hidden=256, sizes=shape, layers=2)
    lora = ["--enable-lora", "--lora-paths", f"tuned={adapter}", "--lora-backend", "torch_native"]
    models[HALF] = qwen3 | {"flags": ["--dtype", "float16"]}
    models[ADAPTER] = qwen3 | {"flags": [*qwen3["flags"], *lora], "adapter": "tuned"}
    generator = random.Random(5)
    prompts = [[generator.randrange(3, 256) for _ in range(length)] for length in PROMPT_LENGTHS]
    request, result = folder / "request.json", folder / "answers.json"
    request.write_text(json.dumps({"prompts": prompts, "tokens": TOKENS, "modes": MODES, "models": models}))
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("model_process.py")), str(request), str(result)],
        env={**os.environ, **cpu.environment()},
        check=True,
        timeout=580,
    )
    return json.loads(result.read_text())


def answer(answers: dict[str, dict[str, Any]], name: str, mode: str) -> dict[str, Any]:
    found = answers[mode][name]
    assert "error" not in found, found["error"]
    return found


def test_every_accepted_architecture_is_tested() -> None:
    assert {"LlamaForCausalLM", *CHECKPOINTS} == set(TESTED_ARCHITECTURES)


@pytest.mark.parametrize("name", [*CHECKPOINTS, *VARIANTS])
def test_rule_all_equals_dense(answers: dict[str, dict[str, Any]], name: str) -> None:
    dense, sparse = answer(answers, name, "dense"), answer(answers, name, "all")
    assert sparse["tokens"] == dense["tokens"]
    assert sparse["sparse"]["kept_fraction"] == 1
    # Else the comparison would show nothing.
    assert min(len(set(row)) for row in dense["tokens"]) > 3, "an answer that repeats itself"
    assert dense["smallest_gap"] > 1e-4, "a choice that rounding may flip"


@pytest.mark.parametrize("name", [*CHECKPOINTS, *VARIANTS])
def test_half_the_coverage_reads_less_and_leaves_no_page_without_summary(
    answers: dict[str, dict[str, Any]], name: str
) -> None:
    report = answer(answers, name, "coverage")["sparse"]
    layers = CHECKPOINTS.get(name, {}).get("num_hidden_layers", 2)
    assert report["sparse_layers"] == FULL_LAYERS.get(name, list(range(layers)))
    assert 0 < report["kept_fraction"] < 0.8
    assert report["closed_pages"] == sum((length + TOKENS - 1) // 64 for length in PROMPT_LENGTHS)
    assert report["stale_pages"] == 0


def test_the_adapter_changes_the_answers(answers: dict[str, dict[str, Any]]) -> None:
    plain = answer(answers, "Qwen3ForCausalLM", "dense")
    assert answer(answers, ADAPTER, "dense")["tokens"] != plain["tokens"]
