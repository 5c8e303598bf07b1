from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from devices import over_devices
from random_model import write_random_model

from sglang_sparse.calibrate.candidates import block_log_mass, token_scores
from sglang_sparse.calibrate.errors import CalibrationError
from sglang_sparse.calibrate.grids import delta_grid
from sglang_sparse.calibrate.measure import measure, prepare
from sglang_sparse.calibrate.prompts import Prompt
from sglang_sparse.calibrate.replay import Replay
from sglang_sparse.calibrate.settings import DENSE, Setting
from sglang_sparse.options import SparseDecodeOptions

PROMPT = torch.randint(0, 256, (390,), generator=torch.Generator().manual_seed(0)).tolist()
SPARSE = SparseDecodeOptions(gamma=0.8, sink_tokens=4, window_tokens=8)


@over_devices
def test_dense_passes_equal_the_plain_model(
    device: str, replay_on: Callable[[str], Replay], model_folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    replay = replay_on(device)
    prefix = replay.prefill(PROMPT, 40)
    tokens = replay.decode_densely(prefix)
    assert len(tokens) == 40
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = plain(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) :]
    made = replay.force(prefix, tokens, DENSE)
    torch.testing.assert_close(made.logits.cpu(), expected, rtol=1e-3, atol=2e-3)
    assert made.logits.argmax(-1)[:-1].tolist() == tokens[1:]
    assert (made.kept == 1).all()
    assert (made.coverage == 1).all()
    assert (made.bytes_read == 1).all()


@over_devices
@pytest.mark.parametrize("page_size", [16, 64])
def test_one_pass_equals_decoding_token_by_token(
    device: str, page_size: int, replay_on: Callable[[str], Replay]
) -> None:
    """390 + 80 tokens: several pages close in between, and each step sees only what was closed before it."""
    replay = replay_on(device)
    # Thumbnails are read with bfloat16 queries: the rounding of a batch of another size can tip one to a neighbour.
    options = SPARSE if device == "cpu" else dataclasses.replace(SPARSE, estimator="mean")
    setting = Setting(options, page_size=page_size)
    tokens = PROMPT[:80]
    together = replay.force(replay.prefill(PROMPT, 80), tokens, setting)
    prefix = replay.prefill(PROMPT, 80)
    for index, token in enumerate(tokens):
        alone = replay.force(prefix, [token], setting)
        torch.testing.assert_close(alone.logits[0], together.logits[index], rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(alone.kept[:, 0], together.kept[:, index])
        torch.testing.assert_close(alone.coverage[:, 0], together.coverage[:, index], rtol=1e-4, atol=1e-5)
        prefix.length += 1
        prefix.room -= 1
    assert together.kept.mean() < 0.8


@over_devices
def test_top_delta_comes_closer_with_delta(device: str, replay_on: Callable[[str], Replay]) -> None:
    """Exact scores, thumbnails and FFD's symmetric code, from little to everything."""
    replay = replay_on(device)
    prefix, tokens = replay.prefill(PROMPT, 20), PROMPT[:20]
    dense = replay.force(prefix, tokens, DENSE)
    base = Setting(SparseDecodeOptions(sink_tokens=4, window_tokens=8))
    grid = delta_grid(base, [0.05, 50.0])
    assert [setting.value for setting in grid[:2]] == [0.05, 50.0]
    assert {setting.rule for setting in grid} == {"top-delta"}
    assert "symmetric-2bit/page64/block16" in {setting.estimator for setting in grid}
    for little, much in zip(grid[::2], grid[1::2], strict=True):
        near, far = replay.force(prefix, tokens, much), replay.force(prefix, tokens, little)
        torch.testing.assert_close(near.logits, dense.logits, rtol=1e-3, atol=2e-3)
        assert (near.kept == 1).all()
        assert far.kept.mean() < 0.95
        assert (far.logits - dense.logits).abs().max() > 0.01


@over_devices
def test_exact_at_gamma_one_is_dense(device: str, replay_on: Callable[[str], Replay]) -> None:
    """A gamma that only rounds to 1 goes through estimator, rule and lists; 1 itself is short-cut to rule `all`."""
    prompt = Prompt("p", "text", PROMPT, PROMPT[:20])
    nearly = 1 - 1e-9
    rounded = Setting(SparseDecodeOptions(estimator="exact", gamma_by_head=((1.0, 1.0), (1.0, nearly))))
    short_cut = Setting(SparseDecodeOptions(estimator="exact", gamma_by_head=((1.0, 1.0), (1.0, 1.0))))
    for setting, scanned in ((rounded, True), (short_cut, False)):
        (result,) = measure(replay_on(device), [prompt], [setting], 20)
        assert result.kl_mean == result.kl_max == 0
        assert result.agreement == result.kept == 1
        assert result.coverage_p1 == pytest.approx(1, abs=1e-5)
        assert (result.bytes_read > 1.4) == scanned


@over_devices
def test_coverage_is_the_true_share_of_what_was_read(device: str, replay_on: Callable[[str], Replay]) -> None:
    """The exact rule's coverage is at least gamma on average over the group, and just so."""
    replay = replay_on(device)
    options = dataclasses.replace(SPARSE, estimator="exact", sink_tokens=0, window_tokens=1, gamma=0.7)
    made = replay.force(replay.prefill(PROMPT, 30), PROMPT[:30], Setting(options))
    averages = made.coverage.mean(-1)
    assert (averages > 0.7 - 1e-4).all()
    assert averages.median() < 0.85


def test_bytes_are_those_of_the_scan_and_of_the_blocks_read(replay_on: Callable[[str], Replay]) -> None:
    replay = replay_on("cpu")
    tokens = PROMPT[:10]
    made = replay.force(replay.prefill(PROMPT, 10), tokens, Setting(dataclasses.replace(SPARSE, thumbnail_bits=2)))
    lengths = torch.arange(391, 401, dtype=torch.float64)
    closed = (lengths // 64 * 64).sum().item()
    # 2 bits a channel, low and step of 2 bytes for each page and channel; 4 bytes of key and value. Open pages: keys.
    total = lengths.sum().item()
    # A mean value of 2 bytes a channel for each page.
    scanned = closed * (2 / 8 + 4 / 64 + 2 / 64) / 4 + (total - closed) / 2
    assert made.scanned.tolist() == pytest.approx([scanned / total] * 2, rel=1e-5)
    blocks = (lengths / 16).ceil().sum()
    torch.testing.assert_close(made.bytes_read, made.kept_blocks.sum((1, 2)) / (2 * blocks) + made.scanned)


def test_a_dense_layer_reads_everything(replay_on: Callable[[str], Replay]) -> None:
    replay = replay_on("cpu")
    options = dataclasses.replace(SPARSE, dense_layers=(0,))
    made = replay.force(replay.prefill(PROMPT, 10), PROMPT[:10], Setting(options))
    assert made.bytes_read[0] == 1
    assert made.kept[1].mean() < 0.8


def test_gamma_by_layer_and_by_head_reach_their_rows(replay_on: Callable[[str], Replay]) -> None:
    replay = replay_on("cpu")
    by_layer = Setting(dataclasses.replace(SPARSE, gamma_by_layer=(0.5, 0.99)))
    made = replay.force(replay.prefill(PROMPT, 10), PROMPT[:10], by_layer)
    assert made.kept[0].mean() < made.kept[1].mean()
    by_head = Setting(dataclasses.replace(SPARSE, gamma_by_head=((0.5, 1.0), (1.0, 0.5))))
    made = replay.force(replay.prefill(PROMPT, 10), PROMPT[:10], by_head)
    assert (made.kept[0, :, 1] == 1).all()
    assert (made.kept[1, :, 0] == 1).all()
    assert made.kept[0, :, 0].mean() < 0.9
    assert by_head.value == 0.75


def test_the_tail_answers_for_what_was_not_read(replay_on: Callable[[str], Replay]) -> None:
    """With exact masses, and values that are equal inside each cell, the tail is exact, whatever was left out."""
    replay = replay_on("cpu")
    prefix = replay.prefill(PROMPT, 10)
    values = torch.randn(prefix.v.shape[0], prefix.v.shape[1] // 64, 1, *prefix.v.shape[2:])

    def logits(setting: Setting) -> torch.Tensor:
        with torch.inference_mode():
            prefix.v.unflatten(1, (-1, 64))[:] = values
        return replay.force(prefix, PROMPT[:10], setting).logits

    options = dataclasses.replace(SPARSE, estimator="exact", gamma=0.3)
    dense = logits(DENSE)
    assert (logits(Setting(options, tail=0)) - dense).abs().max() > 0.5
    torch.testing.assert_close(logits(Setting(options, tail=64)), dense, rtol=1e-3, atol=2e-3)


@over_devices
def test_a_prefix_that_waited_elsewhere_gives_the_same(device: str, replay_on: Callable[[str], Replay]) -> None:
    replay = replay_on(device)
    prefix = replay.prefill(PROMPT, 10)
    parked = prefix.on("cpu")
    assert parked.k.device.type == "cpu"
    assert (parked is prefix) == (device == "cpu")
    assert parked.bytes == prefix.bytes == 2 * prefix.k.nbytes
    direct = replay.force(prefix, PROMPT[:10], Setting(SPARSE)).logits
    back = replay.force(parked.on(device), PROMPT[:10], Setting(SPARSE)).logits
    assert torch.equal(direct, back)


def test_an_answer_stops_before_the_end_of_text(replay_on: Callable[[str], Replay]) -> None:
    replay = replay_on("cpu")
    whole = replay.decode_densely(replay.prefill(PROMPT, 20))
    assert replay.decode_densely(replay.prefill(PROMPT, 20), frozenset({whole[0]})) == whole[:1]
    stop = next(token for token in whole if token != whole[0])
    assert replay.decode_densely(replay.prefill(PROMPT, 20), frozenset({stop})) == whole[: whole.index(stop)]


def test_block_log_mass_counts_each_rows_own_tokens() -> None:
    q, keys = torch.randn(2, 4, 8), torch.randn(37, 2, 8)
    lengths = torch.tensor([20, 37])
    mass = block_log_mass(token_scores(q, keys, 0.5), lengths, 16)
    for row, length in enumerate(lengths.tolist()):
        for head in range(4):
            scores = (keys[:length, head // 2] @ q[row, head]) * 0.5
            for block in range(-(-length // 16)):
                expected = scores[block * 16 : block * 16 + 16].logsumexp(0)
                torch.testing.assert_close(mass[row, head // 2, head % 2, block], expected)
    assert (mass[0, ..., 2] == float("-inf")).all()


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("Qwen3ForCausalLM", {"head_dim": 128, "layers": 1}),
        ("GemmaForCausalLM", {"head_dim": 256, "layers": 1, "kv_heads": 1, "heads": 4, "hidden_activation": "gelu"}),
        ("Qwen2ForCausalLM", {"layers": 1, "heads": 7, "kv_heads": 1, "hidden": 448}),
    ],
)
def test_other_architectures_run(architecture: str, config: dict, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "m", architecture=architecture, **config)
    replay = Replay(folder, device="cpu")
    reference = prepare(replay, Prompt("p", "text", PROMPT[:200], PROMPT[:10]), 10)
    made = replay.force(reference.prefix, reference.tokens, Setting(SPARSE))
    assert made.logits.isfinite().all()
    assert 0 < made.kept.mean() < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Gemma2ForCausalLM"]}, "is Gemma2ForCausalLM: use one of"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}, "sliding-window"),
        ({"head_dim": 48}, "head dim 48"),
        ({"num_attention_heads": 48, "num_key_value_heads": 2}, "24 query heads a KV head"),
    ],
)
def test_models_of_another_kind_are_refused(change: dict, message: str, tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    config = json.loads((model_folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CalibrationError, match=message):
        Replay(folder, device="cpu")
