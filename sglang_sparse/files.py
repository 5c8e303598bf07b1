"""Writing files whole or not at all, and knowing beforehand that they can be written."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileError(Exception):
    """A file cannot be written. One line: which, why, and what to do."""


def check_target(flag: str, path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Raises if `path` cannot be written, so that hours of work do not end in a typing error."""
    if path.is_dir():
        raise FileError(f"{flag}: {path} is a folder: name a file")
    if suffixes and path.suffix.lower() not in suffixes:
        raise FileError(f"{flag}: {path} has to end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise FileError(f"{flag}: the folder {path.parent} is not there: make it, or name another file")
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"{flag}: the folder {path.parent} cannot be written")


def write_bytes(path: Path, content: bytes) -> None:
    """Writes all of `content` or nothing: readers never see a part of it."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        advice = ": free some space, or name a file on another disk" if error.errno in _NO_ROOM else ""
        raise FileError(f"{path} cannot be written: {error.strerror or error}{advice}") from error
