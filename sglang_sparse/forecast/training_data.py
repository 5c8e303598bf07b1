"""Text to train on: a JSONL file, packed into sequences of one length."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from .errors import ForecastError

MIN_TOKENS = 256
"""Sequences have to be longer than what is always read, or there is nothing to choose."""


def read_texts(path: Path) -> list[str]:
    """The texts of a JSONL file, one `{"text": ...}` or `{"messages": [{"content": ...}, ...]}` a line.

    Raises ForecastError if the file cannot be read, holds nothing, or a line is malformed.
    """
    try:
        # Not splitlines: JSON strings may hold other line separators as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ForecastError(f"--data {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    texts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            texts.append(_text(line, f"--data {path}, line {number}"))
    if not any(texts):
        raise ForecastError(f'--data {path} is empty: give one object a line, such as {{"text": "..."}}')
    return texts


def _text(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ForecastError(f"{where}: not valid JSON ({error})") from None
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return entry["text"]
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages
    ):
        return "\n\n".join(message["content"] for message in messages)
    raise ForecastError(f'{where}: give an object with a string "text", or with "messages" that have "content"')


def pack(texts: list[str], tokenizer: Any, *, length: int, path: Path) -> torch.Tensor:
    """All texts one after another, cut into sequences `[n, length]` int64; what is left over at the end is dropped.

    Of fewer tokens than `length` there is one sequence, of all of them.

    Raises ForecastError if there are too few.
    """
    end = tokenizer.eos_token_id
    tokens: list[int] = []
    for text in texts:
        if text:
            tokens += tokenizer(text, verbose=False).input_ids
            tokens += [end] if end is not None else []
    if len(tokens) < MIN_TOKENS:
        raise ForecastError(
            f"--data {path} has {len(tokens)} tokens: give at least {MIN_TOKENS}, and for a useful forecast as many as "
            "requests will have"
        )
    length = min(length, len(tokens))
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length]).view(count, length)


def fingerprint(sequences: torch.Tensor) -> str:
    """Tells packed sequences apart."""
    content = sequences.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(sequences.shape)}".encode() + content).hexdigest()
