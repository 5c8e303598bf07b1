"""Loading a Hugging Face model with its attention replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_sparse.calibrate.errors import CalibrationError
from sglang_sparse.support import HEAD_DIMS, MAX_GROUP_SIZE

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
)
"""What the harness runs. The server knows more: the harness replaces transformers' attention, not SGLang's."""

_names = itertools.count()


def check_config(config: Any, folder: Path) -> None:
    """Raises CalibrationError unless the model's attention is of the kind that sparse decode serves."""
    architecture = (getattr(config, "architectures", None) or ["an unknown architecture"])[0]
    if architecture not in ARCHITECTURES:
        raise CalibrationError(f"--model {folder} is {architecture}: use one of {', '.join(ARCHITECTURES)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    for wrong, what in (
        (sliding, "sliding-window attention"),
        (getattr(config, "attn_logit_softcapping", None), "attention logit soft-capping"),
        (head_dim not in HEAD_DIMS, f"head dim {head_dim}"),
        (heads // kv_heads > MAX_GROUP_SIZE, f"{heads // kv_heads} query heads a KV head"),
    ):
        if wrong:
            raise CalibrationError(
                f"--model {folder} has {what}, which sparse decode does not serve: use another model"
            )


def load_config(folder: Path) -> Any:
    """The checked config of a model folder."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise CalibrationError(f"--model {folder}: there is no config.json: give the folder of a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each config class has validators of its own, with errors of their own
        raise CalibrationError(f"--model {folder}: {' '.join(str(error).split())}") from None
    check_config(config, folder)
    return config


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CalibrationError(f"--model {folder}: no tokenizer ({' '.join(str(error).split())[:200]})") from None


def stop_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's generation config."""
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:
        ids = None
    more = ids if isinstance(ids, list) else [ids]
    return frozenset({tokenizer.eos_token_id, *more} - {None})


def load_model(folder: Path, attention: Callable, *, device: torch.device | str, dtype: torch.dtype | None) -> Any:
    """The model in `dtype` (its own, if None) on `device`; each attention layer calls `attention`.

    Raises CalibrationError if it cannot be loaded or its attention is of another kind.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    load_config(folder)
    # No mask belongs to a name that transformers does not know: `attention` masks by itself.
    name = f"sglang_sparse_{next(_names)}"
    AttentionInterface.register(name, attention)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", attn_implementation=name, local_files_only=True, output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # readers of weights have errors of their own
        raise CalibrationError(f"--model {folder}: cannot be loaded ({' '.join(str(error).split())[:300]})") from None
    if report["missing_keys"]:
        raise CalibrationError(f"--model {folder}: weights are missing, such as {min(report['missing_keys'])}")
    return model.to(device).eval()
