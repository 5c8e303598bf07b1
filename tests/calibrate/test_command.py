from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sglang_sparse.calibrate import measure, search
from sglang_sparse.calibrate.__main__ import main
from sglang_sparse.calibrate.report import COLUMNS
from sglang_sparse.option_sources import merge
from sglang_sparse.options import ModelShape


def run(folder: Path, *arguments: object) -> int:
    return main(["--model", str(folder), "--device", "cpu", *map(str, arguments)])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Texts of bytes, which is what the model's tokenizer reads."""
    text = Path(__file__).read_text()
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text[start : start + 500]}) for start in (0, 300, 600)))
    return file


def test_report_writes_what_it_measured(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    out, table, picture = tmp_path / "out.json", tmp_path / "rows.csv", tmp_path / "picture.png"
    arguments = ["--prompts", prompts, "--tokens", 8, "--gammas", 0.8, 0.95, "--context", 600]
    assert run(model_folder, *arguments, "--out", out, "--csv", table, "--plot", picture) == 0
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["model"] == model_folder.name
    assert report["context"] == report["mean_context"] == 500
    assert report["shape"]["layers"] == 2
    assert len(report["results"]) == 2 * 7
    for entry in report["results"]:
        assert entry["estimator"] in printed
        assert entry["positions"] == 24
        assert len(entry["kept_by_head"]) == len(entry["coverage_by_head"]) == 2
    exact = [entry for entry in report["results"] if entry["estimator"].startswith("exact")]
    assert exact[0]["kl_mean"] > exact[1]["kl_mean"] > 0
    assert exact[1]["bytes_read"] > exact[0]["bytes_read"]
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == 14
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(model_folder, *arguments[:-2], "--gammas", 0.9, "--csv", table) == 0
    assert len(table.read_text().splitlines()) == 1 + 14 + 7
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [prompts.name, out.name, table.name, picture.name]
    )


def test_calibration_holds_the_target_and_writes_a_config(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    target = 0.05
    arguments = ["--prompts", prompts, "--tokens", 8, "--target-kl", target, "--config", config, "--out", out]
    assert run(model_folder, *arguments) == 0
    report = json.loads(out.read_text())
    best, held_out, *tried = report["results"]
    assert (best["part"], held_out["part"], tried[0]["part"]) == ("chosen", "held out", "tried")
    assert best["options"]["gamma_by_layer"] or 0 < best["options"]["gamma"] < 1
    assert best["kl_mean"] <= target
    assert held_out["kl_mean"] <= target
    assert best["bytes_read"] < 0.95
    assert len(tried) > 20
    options = merge({"config": str(config)})
    options.check_shape(ModelShape("LlamaForCausalLM", 2, 2, 64))
    options.check_layers(2, 2)
    assert "at batch 64" in capsys.readouterr().out


@pytest.fixture
def unlike_heads(model_folder: Path, tmp_path: Path) -> Path:
    """The model with values of one KV head in each layer so small that this head hardly matters."""
    folder = tmp_path / "unlike"
    shutil.copytree(model_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, head in ((0, 1), (1, 0)):
        tensors[f"model.layers.{layer}.self_attn.v_proj.weight"][head * 64 : (head + 1) * 64] *= 0.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_calibration_by_head_reads_less_of_heads_that_matter_less(
    unlike_heads: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "server_estimators", lambda: [{"estimator": "thumbnail"}])
    target, read, options = 0.05, {}, {}
    for per in ("model", "layer", "head"):
        config, out = tmp_path / f"{per}.json", tmp_path / f"{per}-out.json"
        arguments = ["--prompts", prompts, "--tokens", 8, "--target-kl", target, "--config", config, "--out", out]
        assert run(unlike_heads, *arguments, "--block-size", 8, "--gamma-per", per) == 0
        best, held_out, *_ = json.loads(out.read_text())["results"]
        assert best["kl_mean"] <= target
        assert held_out["kl_mean"] <= target
        read[per] = best["bytes_read"]
        options[per] = merge({"config": str(config)})
        options[per].check_layers(2, 2)
    assert options["model"].gamma_by_layer == options["model"].gamma_by_head == options["layer"].gamma_by_head == ()
    by_head = options["head"].gamma_by_head
    assert by_head[0][0] > by_head[0][1]
    assert by_head[1][1] > by_head[1][0]
    assert read["head"] < 0.95 * read["layer"] <= 0.95 * read["model"]


def test_an_unreachable_target_writes_nothing(
    model_folder: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "GAMMAS", (0.5, 0.6))
    config = tmp_path / "config.json"
    assert run(model_folder, "--prompts", prompts, "--tokens", 8, "--target-kl", 1e-12, "--config", config) == 2
    assert "no setting holds --target-kl 1e-12" in capsys.readouterr().err
    assert not config.exists()
    monkeypatch.setattr(search, "GAMMAS", (0.5, 1.0))
    assert run(model_folder, "--prompts", prompts, "--tokens", 8, "--target-kl", 1e-12, "--config", config) == 2
    assert "does not hold below" in capsys.readouterr().err
    assert not config.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-kl", "0.1"], "--target-kl and --config belong together"),
        (["--config", "c.json"], "--target-kl and --config belong together"),
        (["--target-kl", "0", "--config", "c.json"], "--target-kl is 0: give a number above 0"),
        (["--target-kl", "nan", "--config", "c.json"], "--target-kl is nan: give a number"),
        (["--gammas", "1.5"], "--gammas is 1.5"),
        (["--tokens", "0"], "--tokens is 0: give a whole number above 0"),
        (["--num-prompts", "-1"], "--num-prompts is -1"),
        (["--context", "100000"], "--context 100000 exceeds the model's 4096: lower it"),
        (["--context", "200"], "is too short for the generated prompts"),
        (["--page-size", "48"], "--page-size 48 is not supported"),
        (["--block-size", "24"], "--sparse-decode-block-size is 24"),
        (["--block-size", "64", "--page-size", "16"], "block"),
        (["--grid", "frontier", "--page-size", "32"], "--grid frontier brings its own"),
        (["--out", "/nowhere/at/all.json"], "--out: the folder /nowhere/at is not there"),
        (["--prompts", "missing.jsonl"], "--prompts missing.jsonl: cannot be read"),
        (["--plot", "picture"], "--plot: picture has to end in .png"),
        (["--out", "a.json", "--csv", "./a.json"], "--out and --csv both name a.json"),
        (["--gammas", "0.9", "--target-kl", "0.1", "--config", "c.json"], "--gammas has no effect with --target-kl"),
        (["--deltas", "6", "--gammas", "0.9"], "--deltas has no effect with --gammas"),
        (["--deltas", "6", "--grid", "frontier"], "--deltas has no effect with --grid frontier"),
        (["--deltas", "0"], "--deltas is 0: give a number above 0"),
        (["--held-out", "0.5"], "--held-out has no effect without --target-kl"),
        (["--gamma-per", "head"], "--gamma-per has no effect without --target-kl"),
        (["--seed", "1", "--prompts", "p.jsonl"], "--seed has no effect with --prompts"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(
    arguments: list[str], message: str, model_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["--model", str(model_folder), *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("sglang_sparse.calibrate: error: ")
    assert message in error


def test_a_missing_or_broken_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path / "none") == 2
    assert "there is no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert run(tmp_path) == 2
    assert capsys.readouterr().err.startswith("sglang_sparse.calibrate: error: --model")


def test_a_csv_with_other_columns_is_left_alone(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n1,2\n")
    assert run(model_folder, "--prompts", prompts, "--tokens", 8, "--gammas", 0.9, "--csv", table) == 2
    assert "has other columns" in capsys.readouterr().err
    assert table.read_text() == "a,b\n1,2\n"


def test_an_unreadable_csv_is_refused_before_measuring(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table = tmp_path / "rows.csv"
    table.write_bytes(b"\xff\xfe")
    assert run(model_folder, "--csv", table) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_damaged_and_incomplete_weights_are_refused(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    assert run(folder, "--prompts", prompts, "--tokens", 8) == 2
    assert "weights are missing, such as model.layers.1.self_attn.k_proj.weight" in capsys.readouterr().err
    weights.write_bytes(weights.read_bytes()[:1000])
    assert run(folder, "--prompts", prompts, "--tokens", 8) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_an_interruption_is_one_line(
    model_folder: Path, prompts: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "prepare", interrupt)
    assert run(model_folder, "--prompts", prompts, "--tokens", 8) == 130
    assert capsys.readouterr().err.endswith("interrupted, nothing was written\n")
