"""The workload's model and prompts, small and on the CPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.errors import BenchmarkError
from benchmarks.kept_fractions import read_profile
from benchmarks.workload.model import NOTE, Shape, shards, write_model
from benchmarks.workload.preview import first_layer_kept
from benchmarks.workload.prompts import common_prefix, distinct_prompts, run_prompt
from sglang_sparse.calibrate.replay import Replay
from sglang_sparse.calibrate.settings import Setting
from sglang_sparse.options import SparseDecodeOptions

SMALL = Shape(layers=2, hidden=256, intermediate=256, kv_heads=2, group=2, head_dim=64, vocabulary=4096)


def test_sharper_models_keep_less_in_every_layer(tmp_path: Path) -> None:
    """The written model, prefilled and decoded by the fidelity harness."""
    means = []
    for sharpness in (1.0, 5.0):
        folder = tmp_path / str(sharpness)
        write_model(folder, SMALL, sharpness=sharpness, dtype=torch.float32)
        replay = Replay(folder, device="cpu", dtype=torch.float32)
        prefix = replay.prefill(run_prompt(1024, SMALL.vocabulary, seed=1), 4)
        options = SparseDecodeOptions(sink_tokens=0, window_tokens=16)
        forced = replay.force(prefix, replay.decode_densely(prefix), Setting(options))
        means.append(forced.kept.mean((1, 2)))
        assert forced.coverage.mean() == pytest.approx(0.975, abs=0.01)
    assert (means[0] > means[1] + 0.3).all()
    assert (means[0] > 0.6).all()
    assert (means[1] < 0.4).all()


@pytest.fixture(scope="module")
def previews() -> list[tuple[torch.Tensor, float]]:
    """Shares kept, and bytes read, of the default rule at rising sharpness."""
    shape = Shape(hidden=512, vocabulary=50_000)
    return [first_layer_kept(shape, sharpness=s, context=10_000, queries=3) for s in (2.0, 3.0, 3.6, 4.5)]


def test_kept_falls_with_sharpness_through_what_real_models_keep(previews: list[tuple[torch.Tensor, float]]) -> None:
    means = [kept.mean().item() for kept, _ in previews]
    assert means == sorted(means, reverse=True)
    assert means[0] > 0.5
    assert 0.15 < means[2] < 0.35
    assert means[3] < 0.2
    for kept, read in previews:
        # Codes, low and step and a mean of a page: 15.6% of the bytes; the open page's keys.
        assert read - kept.mean().item() == pytest.approx(0.149, abs=0.01)


def test_heads_keep_very_different_shares(previews: list[tuple[torch.Tensor, float]]) -> None:
    """As recorded heads do: the spread of the logarithm is like that of kept_profiles.json."""
    kept, _ = previews[2]
    recorded = read_profile("qwen-30k").log().std()
    assert kept.log().std() == pytest.approx(recorded, abs=0.25)


def test_the_preview_is_printed(capsys: pytest.CaptureFixture) -> None:
    small = ["--hidden", "128", "--kv-heads", "2", "--group", "2", "--head-dim", "64", "--vocabulary", "5000"]
    assert main(["workload", "--preview", "1024", "--device", "cpu", *small]) == 0
    assert capsys.readouterr().out.startswith("context 1024: kept ")


def test_depth_changes_little() -> None:
    """The residual stream of a deep model is still mostly its embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = Shape(layers=24, hidden=256, intermediate=256, kv_heads=2, group=2, head_dim=64, vocabulary=4096)
    model = LlamaForCausalLM(LlamaConfig(**shape.config("float32"), attn_implementation="sdpa")).eval()
    weights = {key: value for shard in shards(shape, 5.0, 0, "cpu", torch.float32) for key, value in shard.items()}
    model.load_state_dict(weights)
    with torch.inference_mode():
        states = model.model(torch.tensor([run_prompt(512, 4096, seed=0)]), output_hidden_states=True).hidden_states
    # The last is normalised; the one before is the last layer's input.
    first, last = states[0][0], states[-2][0]
    likeness = torch.nn.functional.cosine_similarity(first, last, dim=-1)
    assert likeness.min() > 0.9
    assert (last.pow(2).mean(-1).sqrt() < 1.5).all()


def test_the_folder_is_a_model_with_a_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    arguments = ["workload", "--out", str(folder), "--layers", "1", "--hidden", "64", "--intermediate", "64"]
    assert main([*arguments, "--vocabulary", "512", "--head-dim", "64", "--kv-heads", "1", "--sharpness", "2"]) == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {*index["weight_map"].values()}
    assert files == {path.name for path in folder.glob("*.safetensors")}
    assert json.loads((folder / NOTE).read_text())["sharpness"] == 2
    assert AutoTokenizer.from_pretrained(folder)("abc").input_ids
    # Norms of all layers and the last are the shape's too.
    shape = Shape(1, 64, 64, 1, 4, 64, 512)
    held = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert held == pytest.approx(2 * shape.parameters, rel=0.05)


def test_the_shape_is_llama_8b() -> None:
    assert Shape().parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--sharpness", "0"], "--sharpness is 0: give a number above 0"),
        (["--layers", "0"], "--layers is 0: give a whole number above 0"),
        (["--head-dim", "63"], "--head-dim is 63: give an even number"),
        (["--vocabulary", "10"], "--vocabulary is 10: give at least 300"),
    ],
)
def test_bad_input_is_one_line(changes: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["workload", "--out", str(tmp_path / "model"), *changes]) == 2
    assert capsys.readouterr().err == f"benchmarks workload: {message}\n"
    assert not (tmp_path / "model").exists()


def test_a_folder_with_a_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BenchmarkError, match=r"there is a config\.json already"):
        write_model(tmp_path, SMALL)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_weights_that_do_not_fit_are_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="GB are free"):
        write_model(tmp_path / "model", Shape(layers=10**6))
    assert not list((tmp_path / "model").iterdir())


def test_prompts_are_runs_of_equal_tokens() -> None:
    prompt = run_prompt(10_000, 50_000, seed=3)
    assert len(prompt) == 10_000
    assert prompt == run_prompt(10_000, 50_000, seed=3)
    changes = sum(a != b for a, b in itertools.pairwise(prompt))
    assert 10_000 / (changes + 1) == pytest.approx(64, rel=0.25)
    assert min(prompt) >= 1000
    assert max(prompt) < 50_000


def test_prompts_share_no_prefix() -> None:
    prompts = distinct_prompts(64, 500, 128256)
    assert len({prompt[0] for prompt in prompts}) == 64
    assert common_prefix(prompts) == 0
    assert common_prefix([[1, 2, 3], [1, 2, 4]]) == 2
