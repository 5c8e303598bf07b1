"""What stops offload at start."""

from __future__ import annotations

from sglang_sparse.option_values import OptionsError


class OffloadError(OptionsError):
    """Offload cannot run as asked. One line: the flag, what was asked, what is available, what to do."""
