"""Comparing two result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_sparse.evaluate.__main__ import main
from sglang_sparse.evaluate.files import write_json

TASKS = ("niah_single_1", "ruler_cwe")


def result(path: Path, lost: dict[str, list[float]], kind: str = "ruler", count: int = 20, **extra: Any) -> Path:
    """A result file in which all samples score 1, but for the first ones of each task in `lost`."""
    samples = [
        {"task": task, "length": 4096, "id": f"{task}-{index}", "score": score, "answer": "x"}
        for task in TASKS
        for index, score in enumerate((lost.get(task, []) + [1.0] * count)[:count])
    ]
    write_json(path, {"kind": kind, "samples": samples, **extra})
    return path


def compare(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[list[str]], str]:
    code = main(["compare", *map(str, paths)])
    captured = capsys.readouterr()
    lines = [line for line in captured.out.splitlines() if line.startswith("|")]
    return code, [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]], captured.err


def test_equal_runs_are_not_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = result(tmp_path / "a.json", {"ruler_cwe": [0.5]})
    code, rows, _ = compare(capsys, path, path)
    assert code == 0
    assert rows == [
        ["niah_single_1", "4096", "20", "1.0000", "1.0000", "0", "0", "1", "1", "no"],
        ["ruler_cwe", "4096", "20", "0.9750", "0.9750", "0", "0", "1", "1", "no"],
        ["all", "all", "40", "0.9875", "0.9875", "0", "0", "1", "", "no"],
    ]


def test_a_task_that_lost_much_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, sparse = result(tmp_path / "a.json", {}), result(tmp_path / "b.json.gz", {"niah_single_1": [0.0] * 6})
    code, rows, _ = compare(capsys, dense, sparse)
    assert code == 1
    assert rows[0] == ["niah_single_1", "4096", "20", "1.0000", "0.7000", "0", "6", "0.0156", "0.0312", "YES"]
    assert [row[-1] for row in rows[1:]] == ["no", "YES"]
    # A gain is not a loss.
    assert compare(capsys, sparse, dense)[0] == 0


def test_the_correction_decides_for_rows_and_all_together_still_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = result(tmp_path / "a.json", {})
    few = result(tmp_path / "b.json", {"niah_single_1": [0.0] * 5, "ruler_cwe": []})
    rows = compare(capsys, dense, few)[1]
    # p is 1/32; twice that is above 5%.
    assert rows[0][7:] == ["0.0312", "0.0625", "no"]
    spread = result(tmp_path / "c.json", {"niah_single_1": [0.0] * 3, "ruler_cwe": [0.9, 0.8]})
    code, rows, _ = compare(capsys, dense, spread)
    assert code == 1
    assert [row[-1] for row in rows] == ["no", "no", "YES"]
    assert rows[2][5:8] == ["0", "5", "0.0312"]


def test_a_file_of_another_kind_of_server_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = result(tmp_path / "a.json", {}, server={"sparse_decode": None})
    sparse = result(tmp_path / "b.json", {}, server={"sparse_decode": [{"steps": 3}]})
    assert compare(capsys, dense, sparse)[2] == ""
    code, _, told = compare(capsys, sparse, dense)
    assert code == 0
    assert told.splitlines() == [
        f"note: {sparse} was run on a server that decodes sparsely",
        f"note: {dense} was run on a server that decodes densely",
    ]


def test_needle_files_are_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = result(tmp_path / "a.json", {}, kind="needle")
    assert compare(capsys, dense, result(tmp_path / "b.json", {"ruler_cwe": [0.0] * 9}, kind="needle"))[0] == 1


def damaged(path: Path, change: Any) -> Path:
    content = json.loads(result(path, {}).read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda path: result(path, {}, count=19), r"differ in their samples \(40 and 38, 38 in common\)"),
        (lambda path: result(path, {}, kind="needle"), "different commands"),
        (lambda path: path, "cannot be read"),
        (lambda path: (path.write_text("") and path) or path, "is empty"),
        (lambda path: path.write_text('{"kind": "ruler", ') and path, "damaged or no JSON"),
        (lambda path: path.write_text("[" * 10**5) and path, "damaged or no JSON"),
        (lambda path: path.write_text("[]") and path, "not a file of the kind"),
        (lambda path: path.write_bytes(b"\x1f\x8b\x08broken") and path, "damaged or no JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00") and path, "damaged or no JSON"),
        (lambda path: damaged(path, lambda c: c.pop("samples")), "has no samples"),
        (lambda path: damaged(path, lambda c: c["samples"].clear()), "is damaged"),
        (lambda path: damaged(path, lambda c: c["samples"][3].update(score=None)), "is damaged"),
        (lambda path: damaged(path, lambda c: c["samples"][3].pop("id")), "is damaged"),
        (lambda path: damaged(path, lambda c: c.update(format=0)), "has format 0"),
    ],
)
def test_files_that_cannot_be_compared(
    other: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = other(tmp_path / "b.json")
    code, rows, error = compare(capsys, result(tmp_path / "a.json", {}), path)
    assert code == 2
    assert rows == []
    assert re.fullmatch(rf"error: .*{message}.*\n", error)
