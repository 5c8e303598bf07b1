"""docs/robustness.md: each test that its table of users' cases names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CITED = re.compile(r"`((?:[a-z]+/)?test_\w+\.py)(?:::(test_\w+))?`")


def cited() -> list[tuple[str, str]]:
    text = (ROOT / "docs/robustness.md").read_text()
    section = text.split("## What users report", 1)[1].split("\n## ", 1)[0]
    return sorted(set(CITED.findall(section)))


@pytest.mark.parametrize(("file", "name"), cited())
def test_it_is_there(file: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / "tests" / file).read_text() if name else (ROOT / "tests" / file).is_file()


def test_there_are_tests_to_check() -> None:
    assert len(cited()) > 25
