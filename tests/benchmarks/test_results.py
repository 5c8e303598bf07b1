"""The results file: its header, whole appends, refusals."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.results import COLUMNS, Results, Row, read_results, text_table
from sglang_sparse.files import FileError

ROW = Row("step", "a case, with a comma", 2, 1000, "sparse", 1.25, kept=0.2, bytes_read=12345, read_share=0.9)


def test_rows_are_appended_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    first = Results(path, "python -m benchmarks step --batch 2")
    assert not path.exists()
    first.append([ROW])
    first.append([ROW, ROW])
    Results(path, "other").append([ROW])
    assert path.read_text().count("date,gpu") == 1
    rows = read_results(path, "--csv")
    assert len(rows) == 4
    assert [row["run"] == first.run for row in rows] == [True, True, True, False]
    row = rows[0]
    assert tuple(row) == COLUMNS
    assert row["case"] == "a case, with a comma"
    assert (row["ms"], row["kept"], row["bytes_read"], row["read_share"], row["kl"]) == (
        "1.25",
        "0.2",
        "12345",
        "0.9",
        "",
    )
    assert row["command"] == "python -m benchmarks step --batch 2"
    assert "torch" in row["versions"]


def test_a_last_line_without_its_end_is_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    Results(path, "one").append([ROW])
    path.write_text(path.read_text().rstrip("\n"))
    Results(path, "two").append([ROW])
    assert [row["command"] for row in read_results(path, "--csv")] == ["one", "two"]


def test_a_file_of_another_kind_is_refused_before_measuring(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("model,context\nx,1\n")
    with pytest.raises(FileError, match=r"results\.csv: its first line is not 'date,gpu,.*': name another file"):
        Results(path, "")
    assert path.read_text() == "model,context\nx,1\n"
    with pytest.raises(FileError, match="has to end in"):
        Results(tmp_path / "results.json", "")
    with pytest.raises(FileError, match="is not there"):
        Results(tmp_path / "no" / "results.csv", "")


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_measurement_is_not_written(tmp_path: Path, ms: float) -> None:
    results = Results(tmp_path / "results.csv", "")
    with pytest.raises(ValueError, match="not a measurement"):
        results.append([ROW, Row("step", "c", 1, 1, "sparse", ms)])
    assert not (tmp_path / "results.csv").exists()


def test_nothing_is_kept_without_a_file() -> None:
    Results(None, "").append([ROW])


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_commit_tells_whether_files_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    # A repository above the temporary folder is none of ours.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    assert machine.commit() == "unknown"
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc")
    assert machine.commit() == "abc"
    git(tmp_path, "init", "-q")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "benchmarks" / "results.csv").write_text("a")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    clean = machine.commit()
    assert len(clean) == 12
    (tmp_path / "benchmarks" / "results.csv").write_text("a\nb")
    assert machine.commit() == clean
    (tmp_path / "code.py").write_text("2")
    assert machine.commit() == f"{clean}-dirty"


def test_tables_are_aligned() -> None:
    assert text_table(("a", "bb"), [("long", "1")]) == "a     bb\nlong   1"


def test_the_shipped_results_have_the_header() -> None:
    shipped = Path(__file__).parents[2] / "benchmarks" / "results.csv"
    if shipped.exists():
        with shipped.open(newline="") as file:
            rows = list(csv.reader(file))
        assert tuple(rows[0]) == COLUMNS
        assert all(len(row) == len(COLUMNS) for row in rows)
