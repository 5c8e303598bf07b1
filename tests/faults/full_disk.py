"""A disk that has no room for one file, as far as `sglang_sparse.files` is concerned."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest


class _FullFile(io.FileIO):
    """Takes a few bytes, then says what Linux says; like there, what was buffered fails as late as in `close`."""

    def write(self, data: Any) -> int:
        super().write(memoryview(data)[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_for(temporary: str, name: str) -> bool:
    """Whether `write_bytes` made the file `temporary` for `name`: what follows has no dot."""
    return temporary.startswith(f".{name}.") and "." not in temporary.removeprefix(f".{name}.")


def fill(monkeypatch: pytest.MonkeyPatch, target: Path, after: int = 0) -> None:
    """From now on `target` cannot be written, but for the first `after` times."""
    original, times = os.fdopen, [after]

    def fdopen(handle: int, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        opened = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if opened.parent != target.parent.resolve() or not _is_for(opened.name, target.name):
            return original(handle, mode, *arguments, **more)
        times[0] -= 1
        return (
            original(handle, mode, *arguments, **more) if times[0] >= 0 else io.BufferedWriter(_FullFile(handle, mode))
        )

    monkeypatch.setattr(os, "fdopen", fdopen)
