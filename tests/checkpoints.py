"""Tiny random checkpoints of many architectures, made by transformers' own classes: real names of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from random_model import write_byte_tokenizer

BASE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

SIZES = (
    (("q_proj", "k_proj", "qkv_proj"), 2.0),
    (("o_proj", "self_attn.dense"), 4.0),
    (("lm_head",), 8.0),
)
"""How large the outputs of random weights are, for inputs of size 1; 1 for others.

Queries and keys: attention is peaked, as a trained model's is. Attention's output: what it adds outweighs the token
itself, or models that tie their embeddings would say their last token for ever. Logits: wide margins between greedy
choices, so that rounding cannot flip them.
"""


def write_checkpoint(folder: Path, model_type: str, *, embedding: float = 8.0, seed: int = 0, **config: Any) -> Path:
    """Writes config and fp32 weights of a random model, and a byte tokenizer, into `folder` and returns it.

    `embedding` is the size of embeddings, as `SIZES` has it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**BASE, **config}), dtype=torch.float32
    )
    sizes = ((("embed_tokens",), embedding), *SIZES)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(std=0.1, generator=generator)
            elif "q_norm" in name or "k_norm" in name:
                # As for projections without a norm behind them.
                tensor.fill_(2.0)
            elif tensor.dim() >= 2:
                size = next((size for parts, size in sizes if any(part in name for part in parts)), 1.0)
                tensor.normal_(std=size * tensor.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"torch_dtype": "float32"}))
    write_byte_tokenizer(folder)
    return folder


def write_adapter(folder: Path, *, hidden: int, sizes: dict[str, int], layers: int, rank: int = 4) -> Path:
    """Writes a random LoRA adapter, as PEFT does, for the attention projections `sizes` (name: output size)."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(layers):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            inputs = hidden if name != "o_proj" else sizes["q_proj"]
            tensors[f"{prefix}.lora_A.weight"] = torch.randn((rank, inputs), generator=generator) * inputs**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn((size, rank), generator=generator) * rank**-0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(sizes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
