"""`python -m benchmarks`: names, bad input, and machines that lack what a benchmark needs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from serving import FakeServer

from benchmarks import plot
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.errors import BenchmarkError
from benchmarks.kept_fractions import draw_kept, profile_names, read_profile
from benchmarks.results import Results, Row, read_results
from benchmarks.server import load, tpot
from benchmarks.server.client import Client

ROOT = Path(__file__).parents[2]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a config and nothing else."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 5000}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_names_are_listed_with_a_line_each(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for name, (_, text) in BENCHMARKS.items():
        assert f"  {name.ljust(max(map(len, BENCHMARKS)))}  {text}\n" in shown


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["speed"]) == 2
    assert capsys.readouterr().err.startswith("benchmarks: unknown name 'speed': use one of kernel, step")


@without_gpu
@pytest.mark.parametrize("name", ["kernel", "step", "tpot", "load", "chat"])
def test_without_a_gpu_nothing_is_measured(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    results = tmp_path / "results.csv"
    arguments = [] if name in ("kernel", "step") else ["--model", str(model)]
    if name == "tpot":
        arguments += ["--context", "1000"]
    if name != "chat":
        arguments += ["--results", str(results)]
    assert main([name, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"benchmarks {name}: no CUDA device: nothing was measured\n"
    assert captured.out == ""
    assert not results.exists()


@without_gpu
@pytest.mark.parametrize("module", ["benchmarks.kernels", "benchmarks.step", "benchmarks.server.tpot"])
def test_modules_run_by_their_own_name(module: str, model: Path) -> None:
    extra = ["--model", str(model), "--context", "10"] if "server" in module else []
    done = subprocess.run([sys.executable, "-m", module, *extra], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith(": no CUDA device: nothing was measured\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--sparse-decode-gamma", "2"], "--sparse-decode-gamma is 2"),
        (["step", "--page-size", "48"], "--page-size 48 is not supported"),
        (["step", "--results", "nowhere/results.csv"], "--results: the folder nowhere is not there"),
        (["tpot", "--model", "nowhere", "--context", "5"], "--model nowhere: there is no config.json"),
        (["tpot", "--model", "M", "--context", "5", "--variant", "x"], "--variant x: give a name of its own"),
        (["load", "--model", "M", "--variant", "a=1", "--variant", "a=2"], "--variant a=2: give a name of its own"),
        (["load", "--model", "M", "--variant", "a='1"], "--variant: No closing quotation"),
        (["tpot", "--model", "M", "--context", "5", "--logs", "nowhere"], "--logs nowhere: there is no such folder"),
        (["plot", "--csv", "nowhere.csv", "--out", "x.png"], "--csv nowhere.csv: there is no such file"),
        (["plot", "--out", "x.jpg"], "--out: x.jpg has to end in .png"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(
    arguments: list[str], message: str, model: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    given = [str(model) if each == "M" else each for each in arguments]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"benchmarks {arguments[0]}: {message}")
    assert error.count("\n") == 1


def test_kept_is_a_share_a_profile_or_a_distribution() -> None:
    assert draw_kept("0.3", 5).tolist() == pytest.approx([0.3] * 5)
    recorded = read_profile("qwen-30k")
    assert recorded.shape == (24, 2)
    assert recorded.mean().item() == pytest.approx(0.2147, abs=1e-3)
    assert sorted(draw_kept("qwen-30k", 48).tolist()) == sorted(recorded.flatten().tolist())
    skewed = draw_kept("lognormal:0.2", 1000)
    assert skewed.mean().item() == pytest.approx(0.2, abs=0.01)
    assert skewed.median() < 0.17
    assert 0 < skewed.min() < skewed.max() <= 1
    assert profile_names() == ["qwen-30k", "smollm2-8k"]
    for wrong in ("0", "1.5", "lognormal", "lognormal:x", "llama", "nan"):
        with pytest.raises(BenchmarkError, match=f"--kept {wrong}: "):
            draw_kept(wrong, 4)


@pytest.fixture
def served(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """The fake server in place of those that `tpot` and `load` start; a dense one does not tell what it read."""

    @contextmanager
    def start(model: str, flags: list[str], log: Path):
        server.sparse = "--sparse-decode" in flags
        client = Client(server.url)
        client.start_seconds = 0.0
        yield client

    server.delay = 0.03
    for module in (tpot, load):
        monkeypatch.setattr(module, "Server", start)
        monkeypatch.setattr(module, "require_cuda", lambda: None)
        monkeypatch.setattr(module, "require_package", lambda name: None)
    return server


def test_tpot_measures_dense_and_sparse_in_turn(
    served: FakeServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "results.csv"
    common = ["--model", str(model), "--context", "1000", "500", "--results", str(path), "--logs", str(tmp_path)]
    assert main(["tpot", *common, "--batch", "1", "2", "--tokens", "30"]) == 0
    every = read_results(path, "--csv")
    first = [(row["impl"], row["context"], row["batch"]) for row in every if row["bench"] == "ttft"]
    # One prompt of each context was new to each batch.
    assert first == [(impl, context, "1") for impl in ("dense", "sparse") for context in ("500", "1000") for _ in "ab"]
    rows = [row for row in every if row["bench"] == "tpot"]
    assert [(row["impl"], row["context"], row["batch"], row["kept"]) for row in rows] == [
        (impl, context, batch, kept)
        for impl, kept in (("dense", "1"), ("sparse", "0.25"))
        for context in ("500", "1000")
        for batch in ("1", "2")
    ]
    assert len({row["run"] for row in rows}) == 1
    assert rows[0]["case"] == "tiny, runs prompts, exact capture sizes"
    # Two layers of four heads of 16, keys and values of 2 bytes; 1,000 tokens and half of the answer.
    assert [int(row["bytes_read"]) for row in rows[2::4]] == [512 * 1015, int(0.4 * 512 * 1015)]
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].split()[-2:] == ["100.0%", "100.0%"]

    plotted = tmp_path / "tpot.png"
    pytest.importorskip("matplotlib")
    assert main(["plot", "--csv", str(path), "--out", str(plotted)]) == 0
    assert plotted.read_bytes().startswith(b"\x89PNG")
    assert main(["plot", "--csv", str(path), "--run", rows[0]["run"], "--out", str(tmp_path / "run.png")]) == 0
    assert main(["plot", "--csv", str(path), "--run", "other", "--out", str(tmp_path / "no.png")]) == 2
    assert "--run other: " in capsys.readouterr().err
    assert not (tmp_path / "no.png").exists()


def test_tpot_tells_what_steps_missed_under_offload(
    served: FakeServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    served.missed_bytes = (5_000_000, 15_000_000)
    path = tmp_path / "results.csv"
    common = ["--model", str(model), "--context", "500", "--results", str(path), "--logs", str(tmp_path)]
    assert main(["tpot", *common, "--batch", "1", "--tokens", "20"]) == 0
    rows = [row for row in read_results(path, "--csv") if row["bench"] == "pcie"]
    assert [(row["impl"], row["ms"], row["bytes_read"]) for row in rows] == [("sparse", "0.1", "5000000")]
    assert {"5.0", "75.0%"} <= set(capsys.readouterr().out.splitlines()[-1].split())
    served.missed_bytes = (5_000_000, 0)
    assert main(["tpot", *common, "--batch", "1", "--tokens", "20"]) == 0
    assert "75.0%" not in capsys.readouterr().out


def test_tpot_compares_distributions_with_the_first_server(served: FakeServer, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    common = ["--model", str(model), "--context", "500", "--results", str(path), "--logs", str(tmp_path)]
    assert main(["tpot", *common, "--batch", "1", "2", "--tokens", "20", "--kl-tokens", "4"]) == 0
    rows = [row for row in read_results(path, "--csv") if row["bench"] == "tpot"]
    assert [row["kl"] for row in rows[:2]] == ["", ""]
    named = 0.9 * math.log(0.9 / 0.8) + 0.05 * math.log(0.05 / 0.1)
    assert [float(row["kl"]) for row in rows[2:]] == pytest.approx([named + 0.05 * math.log(0.05 / 0.1)] * 2, rel=1e-3)


def test_load_measures_each_concurrency(served: FakeServer, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    arguments = ["--model", str(model), "--context", "1000", "--results", str(path), "--logs", str(tmp_path)]
    assert main(["load", *arguments, "--concurrency", "1", "3", "--tokens", "10", "--default-captures"]) == 0
    rows = read_results(path, "--csv")
    assert [(row["impl"], row["batch"]) for row in rows[::3]] == [
        ("dense", "1"),
        ("dense", "3"),
        ("sparse", "1"),
        ("sparse", "3"),
    ]
    assert all("SGLang's capture sizes" in row["case"] for row in rows)
    assert len(rows) == 12


def test_a_failing_server_ends_with_1_and_no_row(
    served: FakeServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "results.csv"
    served.fail_after = 0
    arguments = ["--model", str(model), "--context", "100", "--batch", "1", "--results", str(path)]
    assert main(["tpot", *arguments, "--logs", str(tmp_path)]) == 1
    assert "benchmarks tpot: dense: the server answered: " in capsys.readouterr().err
    assert not path.exists()


def test_a_picture_is_of_one_case_and_the_latest_rows(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    results = Results(path, "")
    for case, ms in (("a", 1.0), ("a", 2.0), ("b", 3.0)):
        results.append([Row("tpot", case, 4, 1000, "dense", ms), Row("load", case, 4, 1000, "dense", 9.0)])
    rows = read_results(path, "--csv")
    assert plot.collect(rows, "tpot", "a") == {4: {"dense": {1000: 2.0}}}
    with pytest.raises(BenchmarkError, match="fits 2 cases: name one of a; b"):
        plot.collect(rows, "tpot", "")
    with pytest.raises(BenchmarkError, match="nothing to draw"):
        plot.collect(rows, "tpot", "c")
