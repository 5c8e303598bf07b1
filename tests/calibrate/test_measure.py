from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.calibrate.calibration import predicted_gain, some_of_each_kind, split
from sglang_sparse.calibrate.errors import CalibrationError
from sglang_sparse.calibrate.grids import frontier_grid
from sglang_sparse.calibrate.measure import Reference, Tally
from sglang_sparse.calibrate.prompts import Prompt
from sglang_sparse.calibrate.replay import Pass, Replay
from sglang_sparse.calibrate.report import is_default
from sglang_sparse.calibrate.settings import DENSE, Setting


def reference(name: str, probabilities: list[list[float]]) -> Any:
    return Reference(Prompt(name, "text", [], None), None, [], torch.tensor(probabilities).log())  # type: ignore[arg-type]


def made(probabilities: list[list[float]], kept: list[int], blocks: list[int], scanned: float, tokens: int) -> Pass:
    positions = len(probabilities)
    return Pass(
        logits=torch.tensor(probabilities).log() + 3,
        coverage=torch.linspace(0.5, 1, positions).view(1, positions, 1, 1),
        kept_blocks=torch.tensor(kept, dtype=torch.float64).view(1, positions, 1),
        blocks=torch.tensor(blocks),
        scanned=torch.tensor([scanned], dtype=torch.float64),
        tokens=tokens,
    )


def test_figures_are_sums_over_all_prompts() -> None:
    tally = Tally(DENSE)
    tally.add(reference("a", [[0.5, 0.5]]), made([[0.25, 0.75]], kept=[1], blocks=[2], scanned=0.3, tokens=20))
    tally.add(
        reference("b", [[0.9, 0.1], [0.2, 0.8], [0.2, 0.8]]),
        made([[0.9, 0.1], [0.2, 0.8], [0.8, 0.2]], kept=[10, 20, 30], blocks=[100] * 3, scanned=0.1, tokens=4800),
    )
    result = tally.result()
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    last = 0.2 * math.log(0.2 / 0.8) + 0.8 * math.log(0.8 / 0.2)
    assert result.positions == 4
    assert result.kl_mean == pytest.approx((first + last) / 4, rel=1e-5)
    assert result.kl_max == pytest.approx(last, rel=1e-5)
    assert result.kl_by_prompt == {"a": pytest.approx(first, rel=1e-5), "b": pytest.approx(last / 3, rel=1e-5)}
    # Equal probabilities are dense decode's first token, which sparse decode makes less likely than the second.
    assert result.agreement == 0.5
    # Long prompts weigh by what they hold: 61 of 302 blocks, not the mean of 1/2 and 1/5.
    assert result.kept == pytest.approx(61 / 302)
    assert result.bytes_read == pytest.approx(61 / 302 + (0.3 * 20 + 0.1 * 4800) / 4820)
    assert result.coverage_p1 == 0.5
    assert result.coverage_mean == pytest.approx((0.5 + 0.5 + 0.75 + 1) / 4)


def test_the_predicted_gain_counts_weights_and_kv_in_served_types(replay_on: Callable[[str], Replay]) -> None:
    replay = replay_on("cpu")
    config = replay.model.config
    # Untied: the input embedding is looked up, not read. 2 layers, 2 KV heads of 64 channels, 2 bytes.
    weights = sum(p.numel() for p in replay.model.parameters()) - config.vocab_size * config.hidden_size
    kv = 1000 * 2 * 2 * 64 * 2
    expected = (weights + 8 * kv) / (weights + 8 * kv * 0.25)
    assert f"{expected:.2f} at batch 8" in predicted_gain(replay, 1000, 0.25)
    assert "1.00 at batch 1, 1.00 at batch 8, 1.00 at batch 64" in predicted_gain(replay, 1000, 1.0)


@pytest.mark.parametrize("count", range(2, 19))
def test_held_out_prompts_are_of_every_kind(count: int) -> None:
    kinds = ("retrieval", "code", "prose")
    prompts = [Prompt(f"p{i}", kinds[i % 3], [1], None) for i in range(count)]
    held = split(prompts, 0.34)
    assert 0 < len(held) < count
    if count >= 9:
        assert len(held) == pytest.approx(0.34 * count, abs=2)
    for kind in kinds[:count]:
        parts = {i in held for i, prompt in enumerate(prompts) if prompt.kind == kind}
        if count >= 6:
            assert parts == {True, False}


def test_one_prompt_cannot_be_split() -> None:
    with pytest.raises(CalibrationError, match="give more prompts"):
        split([Prompt("p", "text", [1], None)], 0.34)


def test_few_prompts_are_of_as_many_kinds_as_there_are() -> None:
    kinds = ["text", "text", "chat", "text", "code", "chat"]
    references: Any = [SimpleNamespace(prompt=Prompt(f"p{i}", kind, [1], None)) for i, kind in enumerate(kinds)]

    def names(count: int) -> list[str]:
        return [reference.prompt.name for reference in some_of_each_kind(references, count)]

    assert names(3) == ["p0", "p2", "p4"]
    assert names(5) == ["p0", "p2", "p4", "p1", "p5"]
    assert sorted(names(9)) == [f"p{i}" for i in range(6)]


def test_the_frontier_holds_the_default_and_no_setting_twice() -> None:
    grid = frontier_grid((0.9, 0.95))
    assert len(set(grid)) == len(grid)
    names = [(setting.estimator, setting.rule, setting.value) for setting in grid]
    assert len(set(names)) == len(names)

    class Made:
        def __init__(self, setting: Setting) -> None:
            self.setting = setting

    assert sum(is_default(Made(setting)) for setting in grid) == 1  # type: ignore[arg-type]
