"""The benchmark of the fused pass, on the CPU: both paths keep what is asked for and agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from benchmarks.kernels import bench_fused_top_delta, bench_fused_top_delta_launch, bench_pseudo_maximum
from benchmarks.kernels import bench_top_delta_rule as rule_benchmark
from benchmarks.kernels.common import Suite

SUITE = Suite(
    batches=(2,),
    contexts=(2000,),
    kept=("0.2", "0.5"),
    num_kv_heads=2,
    head_dim=64,
    dtype=torch.float32,
    device="cpu",
)


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(calls: Sequence[Callable[[], object]]) -> float:
        for call in calls:
            call()
        return 1.0

    monkeypatch.setattr("benchmarks.kernels.common.ROTATED_BYTES", 2**20)
    for module in (bench_fused_top_delta, bench_fused_top_delta_launch, bench_pseudo_maximum, rule_benchmark):
        monkeypatch.setattr(module, "time_in_turn", run_once)


def test_both_paths_keep_what_is_asked_for() -> None:
    found = list(bench_fused_top_delta.run(SUITE))
    assert found[0].case == "dense, all blocks"
    assert len(found) == 1 + 2 * 2 * 2 * 3
    for fused, by_kept, lists in zip(found[1::3], found[2::3], found[3::3], strict=True):
        assert fused.case.removeprefix("fused") == lists.case.removeprefix("lists")
        assert fused.case.removeprefix("fused") == by_kept.case.removeprefix("fused by kept")
        assert (fused.kept, fused.bytes) == (by_kept.kept, by_kept.bytes)
        asked = 0.2 if "0.2" in fused.case else 0.5
        # Forced blocks count too, whatever their scores.
        assert asked <= fused.kept <= asked + 0.1
        assert fused.bytes == lists.bytes < found[0].bytes
    case = bench_fused_top_delta.Case(
        SUITE, bench_fused_top_delta.Summaries.make(SUITE, 4), SUITE.batch(2, 2000), "0.2", 0
    )
    case.fused(bench_fused_top_delta.make_workspace(SUITE), tail=True)
    case.by_lists(bench_fused_top_delta.AttentionWorkspace.create(None, 4, 64, "cpu"), tail=True)
    torch.testing.assert_close(case.out, case.list_out)
    assert torch.equal(case.counts, case.list_counts)


@pytest.mark.parametrize("module", [bench_fused_top_delta_launch, bench_pseudo_maximum, rule_benchmark])
def test_the_others_run(module: object) -> None:
    found = list(module.run(SUITE))  # type: ignore[attr-defined]
    assert found
    assert all(m.seconds == 1.0 and m.bytes for m in found)
