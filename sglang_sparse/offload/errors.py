"""What stops offload at start."""

from __future__ import annotations


class OffloadError(Exception):
    """Offload cannot run as asked. One line: the flag, what was asked, what is available, what to do."""
