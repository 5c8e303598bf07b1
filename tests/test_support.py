"""What sparse decode refuses once the pools are there."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_sparse import support
from sglang_sparse.option_values import UnsupportedError


def test_keys_are_kept_in_the_type_of_the_queries() -> None:
    """The kernels multiply one with the other: anything else would end the first decode step."""
    support.check_kv_dtype(torch.float16, torch.float16)
    with pytest.raises(UnsupportedError, match=r"KV cache of torch.bfloat16 with a model of torch.float16: use --kv-c"):
        support.check_kv_dtype(torch.bfloat16, torch.float16)
    with pytest.raises(UnsupportedError, match=r"KV cache of torch.float8_e4m3fn: use --kv-cache-dtype bfloat16"):
        support.check_kv_dtype(torch.float8_e4m3fn, torch.float8_e4m3fn)


def model(*layers: dict[str, Any]) -> torch.nn.Module:
    """A model with these attention layers; what is not given is as in a model that is served."""
    given: dict[str, Any] = {"num_heads": 8, "head_dim": 64, "scaling": 0.125, "num_kv_heads": 2}
    return torch.nn.ModuleList(
        RadixAttention(layer_id=number, **given | changes) for number, changes in enumerate(layers)
    )


WINDOW = {"sliding_window_size": 63}


def test_layers_with_a_sliding_window_are_told_apart() -> None:
    layers = support.attention_layers(model(WINDOW, {}, WINDOW, {}))
    assert [layer.layer_id for layer in layers] == [0, 1, 2, 3]
    assert support.window_layers(layers) == {0, 2}
    with pytest.raises(UnsupportedError, match=r"--sparse-decode-offload does not support a .* which layer 0 of"):
        support.check_no_windows(layers, "--sparse-decode-offload")
    support.check_no_windows(support.attention_layers(model({}, {})), "--sparse-decode-offload")


def test_what_layers_with_a_window_have_is_left_to_sglang() -> None:
    support.attention_layers(model({**WINDOW, "num_heads": 16, "logit_cap": 30.0}, {}))


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([WINDOW, WINDOW], "a model with sliding windows in all layers"),
        ([], "a model whose attention is not SGLang's own"),
        ([{}, {"num_kv_heads": 4}], "other heads than those of other layers, which layer 1"),
        ([{}, {"num_heads": 4}], "other heads than those of other layers, which layer 1"),
        ([{}, {"logit_cap": 50.0}], "logit soft-capping, which layer 1"),
        ([{"v_head_dim": 32}], "values of another head dim than keys, which layer 0"),
        ([{"num_heads": 64}], "over 16 query heads a KV head, which layer 0"),
    ],
)
def test_layers_that_are_not_supported(layers: list[dict[str, Any]], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        support.attention_layers(model(*layers))


def model_config(architecture: str, **changes: Any) -> Any:
    """What is read off SGLang's `ModelConfig`, of a model that is served unless `changes` say otherwise."""
    values: dict[str, Any] = {
        "hf_config": SimpleNamespace(architectures=[architecture]),
        "hf_text_config": SimpleNamespace(),
        "attention_arch": None,
        "head_dim": 128,
        "v_head_dim": 128,
        "is_hybrid_swa": False,
        "has_attention_sinks": False,
        "is_encoder_decoder": False,
        "is_multimodal": False,
        "is_generation": True,
    }
    return SimpleNamespace(**values | changes)


@pytest.fixture
def release_0_5_17(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.17")


@pytest.mark.parametrize("architecture", support.TESTED_ARCHITECTURES)
@pytest.mark.usefixtures("release_0_5_17")
def test_tested_architectures_are_accepted(architecture: str) -> None:
    support.check_model(model_config(architecture))
    # SGLang decides by layer where a window acts; many configs name one that it leaves alone.
    support.check_model(model_config(architecture, hf_text_config=SimpleNamespace(sliding_window=4096)))


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("GptOssForCausalLM", {"has_attention_sinks": True, "is_hybrid_swa": True, "head_dim": 64}, "attention sinks"),
        ("MellumForCausalLM", {"is_hybrid_swa": True}, "a KV pool of their own for sliding-window layers"),
        (
            "Gemma2ForCausalLM",
            {"hf_text_config": SimpleNamespace(attn_logit_softcapping=50.0, sliding_window=4096)},
            "attention logit soft-capping, which Gemma2ForCausalLM has",
        ),
        ("Gemma3ForConditionalGeneration", {"is_multimodal": True}, "multimodal input"),
        ("DeciLMForCausalLM", {}, "DeciLMForCausalLM has not been tested"),
    ],
)
def test_models_that_are_not_supported(architecture: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        support.check_model(model_config(architecture, **changes))


def test_other_releases_have_been_tested_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.23")
    support.check_model(model_config("Qwen3ForCausalLM"))
    with pytest.raises(UnsupportedError, match=r"MixtralForCausalLM has not been tested .*Qwen3ForCausalLM\)"):
        support.check_model(model_config("MixtralForCausalLM"))
    with pytest.raises(UnsupportedError, match=r"LoRA adapters have not been .* 0\.5\.17, or remove --lora-paths"):
        support.check_arguments({"lora_paths": ["tuned=folder"]})
    # A release that the user has allowed by a flag counts as one with all.
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.99")
    support.check_model(model_config("MixtralForCausalLM"))


@pytest.mark.parametrize(
    ("device", "kind", "told"),
    [("cuda", "full", False), ("cuda", "disabled", True), ("cuda", "breakable", True), ("cpu", "disabled", False)],
)
def test_decode_without_graphs_is_told(caplog: pytest.LogCaptureFixture, device: str, kind: str, told: bool) -> None:
    config = SimpleNamespace(decode=SimpleNamespace(backend=kind))
    support.warn_without_graphs(SimpleNamespace(cuda_graph_config=config, device=device))
    assert (f"CUDA graphs of decode steps are {kind} instead of full" in caplog.text) == told
