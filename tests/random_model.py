"""A tiny random model with a byte tokenizer, as a Hugging Face folder: server tests need no download."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTEXT = 4096
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = len(_BYTES) + 2
BOS, EOS = len(_BYTES), len(_BYTES) + 1


def write_random_model(
    folder: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    layers: int = 2,
    hidden: int = 192,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    seed: int = 0,
    bfloat16: bool = False,
    **config: object,
) -> Path:
    """Writes config, tokenizer and fp32 weights of a random model into `folder` and returns it. With `bfloat16` the
    weights are ones that bfloat16 holds."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    intermediate = 2 * hidden
    model_type = architecture.removesuffix("ForCausalLM").lower()
    settings = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "sliding_window": None,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(settings))

    def weight(*shape: int, scale: float | None = None) -> torch.Tensor:
        random = torch.randn(shape, generator=generator) * (scale or shape[-1] ** -0.5)
        return random.bfloat16().float() if bfloat16 else random

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB, hidden, scale=1.0),
        "model.norm.weight": torch.ones(hidden),
        # Large logits: greedy choices then have wide margins, so that rounding cannot flip them.
        "lm_head.weight": weight(VOCAB, hidden, scale=1.0),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        tensors[name + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[name + "post_attention_layernorm.weight"] = torch.ones(hidden)
        # Queries and keys of some size: attention is peaked, as a trained model's is.
        for projection, rows, scale in (("q", heads, 2.0), ("k", kv_heads, 2.0), ("v", kv_heads, 1.0)):
            shape = (rows * head_dim, hidden)
            tensors[f"{name}self_attn.{projection}_proj.weight"] = weight(*shape) * scale
            if architecture == "Qwen2ForCausalLM":
                tensors[f"{name}self_attn.{projection}_proj.bias"] = weight(rows * head_dim, scale=1.0)
        if architecture == "Qwen3ForCausalLM":
            tensors[name + "self_attn.q_norm.weight"] = torch.ones(head_dim)
            tensors[name + "self_attn.k_norm.weight"] = torch.ones(head_dim)
        tensors[name + "self_attn.o_proj.weight"] = weight(hidden, heads * head_dim)
        tensors[name + "mlp.gate_proj.weight"] = weight(intermediate, hidden)
        tensors[name + "mlp.up_proj.weight"] = weight(intermediate, hidden)
        tensors[name + "mlp.down_proj.weight"] = weight(hidden, intermediate)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of single bytes into `folder`."""
    vocabulary = {character: index for index, character in enumerate(_BYTES)} | {"<s>": BOS, "</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )
