"""Prompts for server benchmarks, as token ids, and what a model's config says of its KV cache."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.workload.prompts import RUN_LENGTH, distinct_prompts

KINDS = ("runs", "real", "random")


def read_config(model: str) -> dict[str, Any]:
    """config.json of a model folder. Raises BenchmarkError."""
    path = Path(model) / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"--model {model}: config.json cannot be read ({error})") from None


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """Bytes of keys and values of one token in all layers, in 16-bit types."""
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    return config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * dim * 2 * 2


def make_prompts(kind: str, count: int, context: int, *, model: str, tokenizer: str | None) -> list[list[int]]:
    """`count` prompts of `context` tokens, none of which begins as another does.

    `runs` are those of the workload, `real` are retrieval, code and prose in turn
    (`sglang_sparse.calibrate.prompts`), `random` are evenly drawn tokens.
    """
    config = read_config(model)
    if kind == "runs":
        return distinct_prompts(count, context, config["vocab_size"], run_length=RUN_LENGTH)
    if kind == "random":
        rng = random.Random(0)
        low = min(1000, config["vocab_size"] // 2)
        return [[rng.randrange(low, config["vocab_size"]) for _ in range(context)] for _ in range(count)]
    from sglang_sparse import cpu
    from sglang_sparse.calibrate.errors import CalibrationError
    from sglang_sparse.calibrate.model import load_tokenizer
    from sglang_sparse.calibrate.prompts import generate_prompts

    cpu.activate()
    try:
        made = generate_prompts(load_tokenizer(Path(tokenizer or model)), context=context, count=count, tokens=1)
    except CalibrationError as error:
        raise BenchmarkError(str(error)) from None
    return [prompt.tokens for prompt in made]
