"""The tokenizer that sizes the samples: the model's own, from a folder."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_sparse import cpu
from sglang_sparse.evaluate.files import EvaluationError
from sglang_sparse.evaluate.lm_eval_parts import require

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def check_folder(folder: Path) -> None:
    """Raises unless `folder` has the files of a tokenizer."""
    if not folder.is_dir():
        raise EvaluationError(f"--tokenizer: {folder} is not a folder: name the model's folder")
    if not any((folder / name).is_file() for name in FILES):
        raise EvaluationError(f"--tokenizer: {folder} holds no tokenizer ({', '.join(FILES)}): name the model's folder")


def load(folder: Path) -> Any:
    """The Hugging Face tokenizer in `folder`; nothing is downloaded."""
    check_folder(folder)
    # A tokenizer needs no torch, but where a CPU build of it is, transformers imports a torchvision that does not fit.
    if find_spec("torch") is not None:
        cpu.activate()
    transformers = require("transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        works = len(tokenizer("The quick brown fox.").input_ids) > 0
    except Exception as error:  # transformers raises many kinds of them for a bad folder
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise EvaluationError(f"--tokenizer: {folder} cannot be loaded: {reason[0]}") from error
    if not works:
        raise EvaluationError(f"--tokenizer: {folder} turns text into no tokens: it is empty or damaged")
    return tokenizer


def fingerprint(tokenizer: Any) -> str:
    """Equal for equal vocabularies."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
