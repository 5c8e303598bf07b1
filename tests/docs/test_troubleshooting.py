"""docs/troubleshooting.md: every line that it explains is one that the code can print."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE_ROW = re.compile(r"^\| (?P<line>.*[`*].*?) \| ", re.M)


def texts_of_code() -> str:
    """All texts of the package's source, the constant parts of f-strings joined, one a line."""
    found = []
    for file in (ROOT / "sglang_sparse").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(parts))
    text = "\n".join(found)
    # Names that the messages take from constants.
    return text.replace("{FLAG}", "--sparse-decode")


def quoted_parts() -> list[str]:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    return [part for row in TABLE_ROW.finditer(text) for part in re.findall(r"`([^`]+)`", row["line"])]


@pytest.fixture(scope="module")
def code() -> str:
    return texts_of_code()


@pytest.mark.parametrize("part", quoted_parts())
def test_the_code_says_so(part: str, code: str) -> None:
    # A flag may come into a message through a constant or a function.
    pattern = re.escape(part).replace(re.escape("--sparse-decode"), "(?:\0|--sparse-decode)")
    assert re.search(pattern, code), f"no message of sglang_sparse contains {part!r}"


def test_there_are_lines_to_check() -> None:
    assert len(quoted_parts()) > 25
