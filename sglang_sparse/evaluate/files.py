"""The JSON files that the commands write and read, and the error that ends a command."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_sparse.files import write_bytes

FORMAT = 1
"""Changes when files of an older version could be misread."""

INSTALL = "pip install 'sglang-sparse[eval]'"


class EvaluationError(Exception):
    """The command cannot go on; the text says why and what to do, in one line."""


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`content` as JSON, compressed if the name ends in ``.gz``; equal content gives equal bytes."""
    text = json.dumps({"format": FORMAT, **content}, ensure_ascii=False, indent=1) + "\n"
    data = text.encode()
    # Without a time and a name in the header, which would differ between two runs.
    write_bytes(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def read_json(flag: str, path: Path, kinds: Iterable[str], fields: Iterable[str]) -> dict[str, Any]:
    """A file that `write_json` wrote, of one of `kinds` and with `fields`; anything else is an `EvaluationError`."""
    kinds = tuple(kinds)
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise EvaluationError(f"{flag}: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        what = "is empty" if not data else f"is damaged or no JSON ({error})"
        raise EvaluationError(f"{flag}: {path} {what}: make it anew") from error
    if not isinstance(content, dict) or content.get("kind") not in kinds:
        raise EvaluationError(f"{flag}: {path} is not a file of the kind {' or '.join(kinds)}")
    if content.get("format") != FORMAT:
        raise EvaluationError(f"{flag}: {path} has format {content.get('format')}, not {FORMAT}: make it anew")
    missing = [name for name in fields if name not in content]
    if missing:
        raise EvaluationError(f"{flag}: {path} is damaged, it has no {', '.join(missing)}: make it anew")
    return content
