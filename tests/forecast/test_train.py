"""Training heads: what it starts from, that it resumes to the same result, and what it refuses before it loads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import write_random_model

from sglang_sparse.calibrate.model import load_tokenizer
from sglang_sparse.forecast import train
from sglang_sparse.forecast.choice import make_forecast
from sglang_sparse.forecast.distillation import block_log_masses, choosable, group_log_shares, recall
from sglang_sparse.forecast.projections import ProjectedForecast, folded_forecast
from sglang_sparse.forecast.trainer import Trainer
from sglang_sparse.forecast.training_data import pack, read_texts
from sglang_sparse.forecast.training_state import Recipe

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_forecast.py"
QUICK = (
    "--length",
    "320",
    "--steps",
    "5",
    "--batch",
    "2",
    "--queries",
    "8",
    "--evaluate-every",
    "3",
    "--save-every",
    "2",
    "--dtype",
    "float32",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), architecture="Qwen2ForCausalLM", layers=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    texts = [f"The keeper of the {n}th lighthouse wrote down the weather of the day. " * 9 for n in range(4)]
    chat = {"messages": [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": "It rained."}]}
    path.write_text("".join(json.dumps(each) + "\n" for each in [*({"text": text} for text in texts), chat]))
    return path


def run(folder: Path, data: Path, out: Path, *flags: str) -> int:
    return train.main(["--model", str(folder), "--data", str(data), "--out", str(out), *QUICK, *flags])


class Interruption:
    """Interrupts training after a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        original = Trainer.step

        def stepping(trainer: Trainer) -> float:
            if trainer.progress.step == step:
                raise KeyboardInterrupt
            return original(trainer)

        monkeypatch.setattr(Trainer, "step", stepping)


def test_a_log_file_gets_lines_of_progress(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(train, "LINE_EVERY", 2)
    assert run(folder, data, tmp_path / "heads.safetensors") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == ["step 2 of 5", "step 4 of 5"]


def test_interrupted_and_resumed_is_uninterrupted(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    assert run(folder, data, whole) == 0
    checkpoint = tmp_path / "parts.safetensors.checkpoint"
    for step, resumed in ((3, None), (4, 2)):
        with monkeypatch.context() as patch:
            Interruption(patch, step)
            assert run(folder, data, parts) == 130
        shown = capsys.readouterr().err
        assert "interrupted: the same command goes on" in shown
        assert (f"going on after step {resumed} " in shown) == (resumed is not None)
        assert checkpoint.exists()
        assert not parts.exists()
    assert run(folder, data, parts) == 0
    assert parts.read_bytes() == whole.read_bytes()
    assert parts.with_suffix(".png").read_bytes() == whole.with_suffix(".png").read_bytes()
    assert not checkpoint.exists()


def test_a_checkpoint_of_another_run_is_refused(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "heads.safetensors"
    with monkeypatch.context() as patch:
        Interruption(patch, 3)
        run(folder, data, out)
    capsys.readouterr()
    assert run(folder, data, out, "--learning-rate", "0.1") == 2
    assert "is a checkpoint of another run, of learning_rate 0.0001 and not 0.1: remove it" in capsys.readouterr().err
    (tmp_path / "heads.safetensors.checkpoint").write_bytes(b"nothing")
    assert run(folder, data, out) == 2
    assert "is no checkpoint of this command" in capsys.readouterr().err


def recipe(**change: Any) -> Recipe:
    values: dict[str, Any] = {
        "steps": 1,
        "batch": 1,
        "queries": 8,
        "vectors": 3,
        "learning_rate": 1e-3,
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
        "clip": 0.5,
        "top": 0.25,
        "gamma": 0.9,
        "block": 16,
        "sink": 16,
        "window": 64,
        "evaluate_every": 1,
        "seed": 0,
        "data": "",
        "dtype": "float32",
    }
    return Recipe(**values | change)


@pytest.mark.parametrize("vectors", [1, 3])
def test_training_starts_from_the_query_forecast(folder: Path, vectors: int) -> None:
    """Shares and recall at step 0 are those of the forecast without training, found by another way."""
    sequences = torch.randint(0, 200, (1, 400), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(folder, sequences, recipe(vectors=vectors), device="cpu")
    mean = trainer.evaluate()
    (step, noted, by_layer) = trainer.progress.recalls[0]
    assert (step, noted) == (0, mean)
    parts = trainer.parts
    forecast = folded_forecast(parts) if vectors == 1 else make_forecast("query", parts, "")
    assert forecast is not None
    seen: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def note(layer: int, queries: torch.Tensor, keys: torch.Tensor, scale: float) -> None:
        seen[layer] = (trainer._seen[layer][0], queries, keys)

    trainer._pass(sequences[0], note)
    positions = trainer._positions(8, 400, "0-held-out")
    assert positions.min() >= 16 + 64 + 32
    valid = choosable(positions, 400, block=16, sink=16, window=64)
    for layer in (1, 2):
        x, (_, queries, keys) = seen[layer - 1][0], seen[layer]
        shares = []
        for vectors_of in (
            queries[positions].unflatten(1, (2, 3)),
            forecast.vectors(layer, x[positions], positions),
        ):
            masses = block_log_masses(vectors_of, keys, positions, scale=64**-0.5, block=16)
            shares.append(group_log_shares(masses, valid))
        assert by_layer[layer] == pytest.approx(recall(*shares, valid, 0.9).item(), abs=1e-6)


def test_normed_heads_are_trained_from_a_linear_start(data: Path, tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "qwen3", architecture="Qwen3ForCausalLM", layers=3)
    sequences = torch.randint(0, 200, (2, 400), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(model, sequences, recipe(steps=2), device="cpu")
    assert trainer.evaluate() > 0.5
    before = trainer.heads[1][0].detach().clone()
    trainer.step()
    assert not torch.equal(trainer.heads[1][0], before)
    assert not any(parameter.requires_grad for parameter in trainer.model.parameters())


def missing(trainer: Trainer, sequence: torch.Tensor) -> dict[int, float]:
    """What the heads lack of the mean true queries of their group, squared, by layer."""
    with torch.no_grad():
        sums = trainer._sums([sequence], first=16)
    return {layer: each.squares.item() for layer, each in sums.items()}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(("vectors", "sequences"), [(3, 4), (1, 4), (3, 1)])
def test_the_fit_is_nearer_to_the_true_queries(
    architecture: str, vectors: int, sequences: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a text that it has not seen, too: also with one sequence, of which it sees half."""
    monkeypatch.setattr("sglang_sparse.forecast.trainer.TOKEN_CHUNK", 100)
    model = write_random_model(tmp_path, architecture=architecture, layers=3)
    data = torch.randint(0, 200, (sequences + 1, 500), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(model, data[:-1], recipe(vectors=vectors), device="cpu")
    before = missing(trainer, data[-1])
    trainer.fit()
    after = missing(trainer, data[-1])
    assert set(before) == {1, 2}
    assert all(after[layer] < 0.98 * before[layer] for layer in before), (before, after)


def test_what_is_missing_is_of_the_queries_that_attention_has(folder: Path) -> None:
    """Their lengths are not changed by the rotation: with heads of zeros, all of them are missing."""
    sequences = torch.randint(0, 200, (1, 300), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(folder, sequences, recipe(), device="cpu")
    found: dict[int, float] = {}

    def note(layer: int, queries: torch.Tensor, *_: Any) -> None:
        found[layer] = queries[16:].float().square().sum().item()

    trainer._pass(sequences[0], note)
    for pair in trainer.heads.values():
        for tensor in pair:
            if tensor is not None:
                tensor.detach().zero_()
    assert missing(trainer, sequences[0]) == pytest.approx({layer: found[layer] for layer in (1, 2)}, rel=1e-4)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_without_steps_heads_are_those_of_the_fit(
    architecture: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With a bias, whether or not the model's own queries have one."""
    folder = write_random_model(tmp_path / "model", architecture=architecture, layers=3)
    out = tmp_path / "heads.safetensors"
    assert run(folder, data, out, "--steps", "0") == 0
    assert re.fullmatch(r"recall [\d.]+% before, [\d.]+% fitted; .*\n", capsys.readouterr().out)
    sequences = pack(read_texts(data), load_tokenizer(folder), length=320, path=data)
    trainer = Trainer(folder, sequences, recipe(), device="cpu")
    trainer.fit()
    heads = make_forecast(str(out), trainer.parts, "")
    assert isinstance(heads, ProjectedForecast)
    for layer, (weight, bias) in trainer.heads.items():
        assert bias is not None
        assert bias.any()
        torch.testing.assert_close(heads.projections[layer].weight, weight.detach())
        torch.testing.assert_close(heads.projections[layer].bias, bias.detach())


def test_an_interrupted_training_does_not_fit_again(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    assert run(folder, data, whole) == 0
    with monkeypatch.context() as patch:
        Interruption(patch, 0)
        assert run(folder, data, parts) == 130
    fits: list[Trainer] = []
    monkeypatch.setattr(Trainer, "fit", fits.append)
    assert run(folder, data, parts) == 0
    assert not fits
    assert parts.read_bytes() == whole.read_bytes()


@pytest.fixture
def weightless(folder: Path, tmp_path: Path) -> Path:
    """A model whose weights cannot be loaded: whoever complains of something else has not tried."""
    made = tmp_path / "weightless"
    made.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (made / file.name).write_bytes(file.read_bytes())
    return made


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (None, (), "cannot be read (No such file or directory)"),
        ("", (), 'is empty: give one object a line, such as {"text": "..."}'),
        ('{"text": ""}\n', (), "is empty: give one object"),
        ('{"text": "short"}\n', (), "tokens: give at least 256"),
        ("{", (), "line 1: not valid JSON"),
        ('{"text": "a"}\n{"texts": "b"}\n', (), 'line 2: give an object with a string "text"'),
        ('{"text": "a"}\n', ("--length", "99999"), "--length 99999 exceeds the model's 4096: lower it"),
        ('{"text": "a"}\n', ("--length", "5"), "--length is 5: give a whole number of at least 256"),
        ('{"text": "a"}\n', ("--steps", "-1"), "--steps is -1: give a whole number of at least 0"),
        ('{"text": "a"}\n', ("--steps", "0", "--start", "query"), "--steps is 0: give a whole number of at least 1"),
        ('{"text": "a"}\n', ("--fit-sequences", "0"), "--fit-sequences is 0: give a whole number of at least 1"),
        ('{"text": "a"}\n', ("--top", "0"), "--top is 0: give a number above 0"),
        ('{"text": "a"}\n', ("--out", "heads.bin"), "--out: heads.bin has to end in .safetensors"),
        ('{"text": "a"}\n', ("--model", "nowhere"), "--model nowhere: there is no such folder"),
    ],
)
def test_bad_input_is_said_before_the_model_is_loaded(
    content: str | None,
    flags: tuple[str, ...],
    message: str,
    weightless: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content)
    assert run(weightless, data, tmp_path / "heads.safetensors", *flags) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("sglang_sparse.forecast.train: error: ")
    assert message in lines[0]


def test_vectors_have_to_divide_the_group(folder: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(folder, data, tmp_path / "heads.safetensors", "--vectors", "2") == 2
    assert "--vectors is 2, which does not divide the 3 query heads of a KV head" in capsys.readouterr().err


@pytest.mark.parametrize("start", ["fit", "query"])
def test_example_trains_heads_that_know_more_than_their_start(start: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads.safetensors"
    flags = {"fit": (), "query": ("--start", "query", "--learning-rate", "2e-3")}[start]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(folder), str(out), "--gamma", "0.9", *flags],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    shown = re.search(
        r"loss ([\d.]+) at first, ([\d.]+) at last; recall ([\d.]+)% before,(?: ([\d.]+)% fitted,)? ([\d.]+)% after",
        done.stdout,
    )
    assert shown, done.stdout
    first, last, before, after = (float(shown[group]) for group in (1, 2, 3, 5))
    assert after > before
    if start == "fit":
        assert float(shown[4]) > before
    else:
        assert last < first
    assert out.exists()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
