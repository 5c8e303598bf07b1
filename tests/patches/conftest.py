"""Pristine trees, unpacked once a session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import sglang_trees

RELEASES = ("0.5.17", "0.5.23")


@pytest.fixture(scope="session", params=RELEASES)
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A release that has patches, and its pristine tree; for reading alone."""
    release: str = request.param
    return release, sglang_trees.pristine(release, tmp_path_factory.mktemp(f"sglang-{release}"))


@pytest.fixture
def tree(pristine: tuple[str, Path], tmp_path: Path) -> Any:
    """A tree of this test's own."""
    return sglang_trees.linked_copy(pristine[1], tmp_path / "tree")
