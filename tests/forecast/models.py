"""Tiny random models of transformers, of each architecture that has forecasts."""

from __future__ import annotations

from typing import Any

import torch

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
)
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 6, 2, 16, 48


def random_model(architecture: str, seed: int = 0, **config: Any) -> Any:
    """An evaluated fp32 model whose norms, biases and projections are all random."""
    from sglang_sparse.cpu import activate

    activate()
    import transformers

    name = architecture.removesuffix("ForCausalLM")
    make = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "architectures": [architecture],
        **config,
    }
    if name == "Gemma3":
        settings |= {
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            "sliding_window": 32,
        }
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(make(**settings)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model
