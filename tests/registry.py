"""Tests that need a package from pip where nothing can be reached."""

from __future__ import annotations

import pytest

# What pip says, with --quiet too. A package or version that the registry does not have is no reason to skip.
UNREACHABLE = ("NewConnectionError", "Max retries exceeded", "NameResolutionError", "ReadTimeoutError")


def skip_if_unreachable(output: str) -> None:
    """Skips the test if `output`, of a pip that failed, says that no package registry answered."""
    if any(said in output for said in UNREACHABLE):
        pytest.skip("no package registry can be reached")
