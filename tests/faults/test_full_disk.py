"""A full disk: one line that names the file, what was there before stays, and nothing half-written is left."""

from __future__ import annotations

import ast
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from full_disk import fill
from random_model import write_random_model

import sglang_sparse
from sglang_sparse.calibrate import grids, search
from sglang_sparse.calibrate.__main__ import main as calibrate
from sglang_sparse.calibrate.report import COLUMNS
from sglang_sparse.evaluate.__main__ import main as evaluate
from sglang_sparse.evaluate.files import write_json
from sglang_sparse.files import FileError, write_bytes
from sglang_sparse.forecast.evaluate import main as evaluate_forecasts
from sglang_sparse.forecast.train import main as train

BEFORE = b"what was there before"
ADVICE = "cannot be written: No space left on device: free some space, or name a file on another disk"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts of bytes, which is what the model's tokenizer reads."""
    line = json.dumps({"text": "The keeper of the lighthouse wrote down the weather of the day. " * 9})
    path = tmp_path / "texts.jsonl"
    path.write_text(f"{line}\n{line}\n")
    return path


def assert_refused_whole(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    run: Callable[[], int],
    target: Path,
    before: bytes = BEFORE,
) -> None:
    """`run` cannot write `target`, which exists."""
    target.write_bytes(before)
    with monkeypatch.context() as patch:
        fill(patch, target)
        assert run() == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(lines) == 1
    assert lines[0].endswith(f"error: {target} {ADVICE}")
    assert target.read_bytes() == before
    hidden = [path.name for path in target.parent.iterdir() if path.name.startswith(".")]
    assert hidden == []


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_what_was_there_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int) -> None:
    """Small content fails when the file is closed, large when it is written."""
    target = tmp_path / "out.json"
    target.write_bytes(BEFORE)
    with monkeypatch.context() as patch:
        fill(patch, target)
        with pytest.raises(FileError, match="No space left on device: free some space"):
            write_bytes(target, bytes(size))
    assert target.read_bytes() == BEFORE
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    write_bytes(target, b"new")
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_without_room_for_a_new_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    """No inode is left, or a quota or the largest size of a file is reached."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(FileError, match=f"{os.strerror(number)}: free some space"):
        write_bytes(tmp_path / "out.json", b"new")


@pytest.mark.parametrize("which", ["--out", "--csv", "--plot"])
def test_measuring(
    model: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    which: str,
) -> None:
    if which == "--plot":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(grids, "server_grid", lambda base, gammas: [base])
    target = tmp_path / {"--out": "out.json", "--csv": "rows.csv", "--plot": "plot.png"}[which]
    command = ["--model", model, "--device", "cpu", "--prompts", texts, "--tokens", 4, which, target]
    before = (",".join(COLUMNS) + "\n").encode() if which == "--csv" else BEFORE
    assert_refused_whole(monkeypatch, capsys, lambda: calibrate([*map(str, command)]), target, before)


def test_calibrating(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(search, "server_estimators", lambda: [{"estimator": "thumbnail"}])
    target = tmp_path / "config.json"
    command = ["--model", model, "--device", "cpu", "--prompts", texts, "--tokens", 4, "--target-kl", 0.5]
    command += ["--gamma-per", "model", "--config", target]
    assert_refused_whole(monkeypatch, capsys, lambda: calibrate([*map(str, command)]), target)


@pytest.mark.parametrize("which", ["heads.safetensors", "heads.png", "heads.safetensors.checkpoint"])
def test_training_goes_on_when_there_is_room_again(
    model: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    which: str,
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "heads.safetensors"
    command = ["--model", model, "--data", texts, "--out", out, "--length", 320, "--steps", 4, "--batch", 1]
    command += ["--queries", 8, "--evaluate-every", 4, "--save-every", 1, "--dtype", "float32"]
    checkpoint = tmp_path / "heads.safetensors.checkpoint"

    def run() -> int:
        return train([*map(str, command)])

    if which == checkpoint.name:
        with monkeypatch.context() as patch:
            # The fit and two steps are kept.
            fill(patch, checkpoint, after=3)
            assert run() == 2
        assert f"error: {checkpoint} {ADVICE}" in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.name, texts.name]
    else:
        assert_refused_whole(monkeypatch, capsys, run, tmp_path / which)
        assert checkpoint.exists()
    assert run() == 0
    assert f"going on after step {2 if which == checkpoint.name else 4} of" in capsys.readouterr().err
    assert out.stat().st_size > len(BEFORE)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not checkpoint.exists()


def test_evaluating_forecasts(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    target = tmp_path / "recall.csv"
    command = ["--model", model, "--device", "cpu", "--prompts", texts, "--tokens", 8, "--warm-up", 2]
    command += ["--context", 600, "--csv", target]
    assert_refused_whole(monkeypatch, capsys, lambda: evaluate_forecasts([*map(str, command)]), target)


def test_results_of_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """All its results go through `write_json`; `compare` only reads."""
    target = tmp_path / "grid.json.gz"
    monkeypatch.setattr("sglang_sparse.evaluate.needle.run", lambda _: write_json(target, {"kind": "needle"}) or 0)
    assert_refused_whole(monkeypatch, capsys, lambda: evaluate(["needle"]), target)


def test_every_file_is_written_whole_or_not_at_all() -> None:
    """Nothing in the package opens a file for writing itself; patches stage their files in a way of their own."""
    root = Path(sglang_sparse.__file__).parent
    found = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if _opens_for_writing(ast.parse(path.read_text()))
    }
    assert found == {"files.py", "patches/tree.py"}


def _opens_for_writing(module: ast.Module) -> bool:
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        modes = [value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        if name in ("open", "fdopen") and any(
            set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes
        ):
            return True
        if isinstance(call.func, ast.Attribute) and name in ("write_text", "write_bytes", "save_file", "mkstemp"):
            return True
    return False
