"""Writes the workload's model: config, tokenizer, and random weights shard by shard.

Every token's residual stream is its embedding, of which each layer's branches change a little (`BRANCH`): so attention
neither evens out nor runs away with depth. Keys and queries are independent random projections of it. With keys of unit
variance, the standard deviation of the attention logits between unlike tokens is about `sharpness` (`HEAD_SPREAD`), and
tokens that are equal and near have nearly equal logits. Query heads of a group share most of their projection
(`GROUP_LIKENESS`), as those of trained models attend to much the same. Norm weights are 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch

from benchmarks.errors import BenchmarkError
from sglang_sparse.files import write_bytes

BRANCH = 0.02
"""Root mean square of what one branch adds to the residual stream, whose embeddings have 1."""

GROUP_LIKENESS = 0.8
"""Correlation of the query projections of the heads of a group."""

HEAD_SPREAD = 0.2
"""Standard deviation of the log of a KV head's sharpness: heads of trained models keep very different shares."""

LOGIT_SPREAD = 4.0
"""Standard deviation of the output logits: greedy choices have wide margins."""

SHARPNESS = 3.6
"""At 30,000 tokens the default settings then keep what they keep of Qwen2.5-Coder-0.5B (docs/benchmarks.md)."""

NOTE = "workload.json"
"""Beside the weights: how they were made."""


@dataclass(frozen=True)
class Shape:
    """The model's shape, by default that of Llama-3.1-8B."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    vocabulary: int = 128256
    context: int = 131072

    def check(self) -> None:
        """Raises BenchmarkError for a shape that no model can have."""
        for name, value in asdict(self).items():
            if value < 1:
                raise BenchmarkError(f"--{name.replace('_', '-')} is {value}: give a whole number above 0")
        if self.head_dim % 2:
            raise BenchmarkError(f"--head-dim is {self.head_dim}: give an even number")
        if self.vocabulary < 300:
            raise BenchmarkError(f"--vocabulary is {self.vocabulary}: give at least 300")

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * self.kv_heads * (2 * self.group + 2)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    def config(self, dtype: str) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.kv_heads * self.group,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }


def _normal(rows: int, columns: int, spread: float, rng: torch.Generator) -> torch.Tensor:
    return torch.empty(rows, columns, device=rng.device).normal_(std=spread, generator=rng)


def project(shape: Shape, sharpness: float, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's query and key projections, `[Hkv * G * D, hidden]` and `[Hkv * D, hidden]`, fp32 on `rng`'s device."""
    unit = shape.hidden**-0.5
    sizes = (shape.kv_heads, shape.group, shape.head_dim, shape.hidden)
    key_rows = shape.kv_heads * shape.head_dim
    common = _normal(key_rows, shape.hidden, unit, rng).view(sizes[0], 1, *sizes[2:])
    own = _normal(key_rows * shape.group, shape.hidden, unit, rng).view(sizes)
    # The spread stays that of one of them, and two heads of a group correlate by GROUP_LIKENESS.
    queries = math.sqrt(GROUP_LIKENESS) * common + math.sqrt(1 - GROUP_LIKENESS) * own
    # The same sharpnesses in every layer, in another order: a layer keeps what the model keeps.
    order = torch.randperm(shape.kv_heads, generator=rng, device=rng.device)
    places = [NormalDist(0, HEAD_SPREAD).inv_cdf((i + 0.5) / shape.kv_heads) for i in order.tolist()]
    queries *= sharpness * torch.tensor(places, device=rng.device).exp()[:, None, None, None]
    return queries.view(-1, shape.hidden), _normal(key_rows, shape.hidden, unit, rng)


def shards(
    shape: Shape, sharpness: float, seed: int, device: torch.device | str, dtype: torch.dtype
) -> Iterator[dict[str, torch.Tensor]]:
    """The weights, on the CPU: layer by layer, then embeddings and output.

    They depend on the seed and on the kind of device, whose generators differ.
    """
    rng = torch.Generator(device).manual_seed(seed)
    s = shape
    unit = s.hidden**-0.5
    query_rows, key_rows = s.kv_heads * s.group * s.head_dim, s.kv_heads * s.head_dim
    for layer in range(s.layers):
        name = f"model.layers.{layer}."
        queries, keys = project(shape, sharpness, rng)
        weights = {
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": _normal(key_rows, s.hidden, unit, rng),
            "self_attn.o_proj": _normal(s.hidden, query_rows, BRANCH * query_rows**-0.5, rng),
            "mlp.gate_proj": _normal(s.intermediate, s.hidden, unit, rng),
            "mlp.up_proj": _normal(s.intermediate, s.hidden, unit, rng),
            "mlp.down_proj": _normal(s.hidden, s.intermediate, BRANCH * s.intermediate**-0.5, rng),
        }
        norms = {f"{name}{which}_layernorm.weight": torch.ones(s.hidden) for which in ("input", "post_attention")}
        named = {f"{name}{key}.weight": value for key, value in weights.items()} | norms
        yield {key: value.to(dtype).cpu().contiguous() for key, value in named.items()}
    yield {
        "model.embed_tokens.weight": _normal(s.vocabulary, s.hidden, 1.0, rng).to(dtype).cpu(),
        "model.norm.weight": torch.ones(s.hidden, dtype=dtype),
        "lm_head.weight": _normal(s.vocabulary, s.hidden, LOGIT_SPREAD * unit, rng).to(dtype).cpu(),
    }


def check_sharpness(sharpness: float) -> None:
    """Raises BenchmarkError unless it is a number above 0."""
    if not (math.isfinite(sharpness) and sharpness > 0):
        raise BenchmarkError(f"--sharpness is {sharpness:g}: give a number above 0")


def write_model(
    folder: Path,
    shape: Shape,
    *,
    sharpness: float = SHARPNESS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Writes the model into `folder`, which is made. `config.json` comes last: a folder without it is not whole.

    Raises BenchmarkError if the folder already has a config.json, or there is no room for the weights.
    """
    import shutil

    from safetensors.torch import save_file

    shape.check()
    check_sharpness(sharpness)
    if (folder / "config.json").exists():
        raise BenchmarkError(f"--out {folder}: there is a config.json already: name an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BenchmarkError(f"--out {folder}: cannot be made ({error.strerror})") from None
    needed = shape.parameters * dtype.itemsize
    if free < needed:
        raise BenchmarkError(f"--out {folder}: the weights take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    name = str(dtype).removeprefix("torch.")
    places: dict[str, str] = {}
    count = shape.layers + 1
    for index, shard in enumerate(shards(shape, sharpness, seed, device, dtype), 1):
        file = f"model-{index:05}-of-{count:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
        progress(f"{index} of {count} shards")
    index_json = {"metadata": {"total_size": needed}, "weight_map": places}
    write_bytes(folder / "model.safetensors.index.json", json.dumps(index_json, indent=1).encode())
    write_tokenizer(folder)
    made = {"sharpness": sharpness, "seed": seed, "device": torch.device(device).type, "branch": BRANCH}
    note = made | {"group_likeness": GROUP_LIKENESS, "head_spread": HEAD_SPREAD, "shape": asdict(shape)}
    write_bytes(folder / NOTE, (json.dumps(note, indent=1) + "\n").encode())
    write_bytes(folder / "config.json", (json.dumps(shape.config(name), indent=1) + "\n").encode())


def write_tokenizer(folder: Path) -> None:
    """A byte tokenizer, so that a server starts: prompts are token ids, and answers are read as ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_bytes(folder / "tokenizer_config.json", json.dumps(config).encode())
