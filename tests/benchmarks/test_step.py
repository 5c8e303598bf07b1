"""The step benchmark's inputs and arithmetic, on the CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.errors import BenchmarkError
from benchmarks.kept_fractions import draw_kept
from benchmarks.step import __main__ as command
from benchmarks.step.case import StepCase, bytes_per_layer
from benchmarks.step.kernels import kernel_table, summarise
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions

GEOMETRY = Geometry(kv_heads=2, group_size=4, head_dim=64, dtype=torch.float32, page_size=64, block_size=16)


def make_case(kept: str, layers: int = 2, context: int = 6000, **options: object) -> StepCase:
    targets = draw_kept(kept, layers * 2 * 2).view(layers, 2, 2)
    sparse = SparseDecodeOptions(min_context=0, **options)
    return StepCase(sparse, GEOMETRY, batch=2, context=context, kept=targets, device="cpu")


@pytest.mark.parametrize("kept", [0.05, 0.2, 0.5])
def test_rows_keep_what_is_asked(kept: float) -> None:
    case = make_case(str(kept))
    kept_now, read = case.measure_read()
    assert kept_now == pytest.approx(kept, abs=0.01)
    # 4-bit codes, low and step of a page, a mean value of a page, over fp32 keys and values; the open page's keys.
    scan = (64 / 2 + 4 * 64 / 64 + 4 * 64 / 64) / (2 * 4 * 64)
    assert read - kept_now == pytest.approx(scan, abs=0.005)


@pytest.mark.parametrize("path", ["lists", "fused"])
def test_rows_keep_what_is_asked_with_top_delta(path: str) -> None:
    kept_now, _ = make_case("0.1", context=3000, rule="top-delta", path=path).measure_read()
    assert kept_now == pytest.approx(0.1, abs=0.02)


def test_each_row_keeps_its_own_share() -> None:
    case = make_case("qwen-30k", layers=3)
    case.measure_read()
    kept = torch.tensor(case.step.counters.read().kept_by_layer_and_head)
    asked = draw_kept("qwen-30k", 12).view(3, 2, 2).mean(1)
    assert torch.allclose(kept, asked, atol=0.01)
    assert kept.std() > 0.02


def test_the_step_is_close_to_dense_attention() -> None:
    case = make_case("0.2")
    case.measure_read()
    for layer in range(case.layers):
        case.attend_all(layer)
    assert 0 < case.difference() < 0.2
    assert (case.dense_out.abs().amax((1, 2, 3)) > 0).all()


def test_rules_without_coverage_need_no_search() -> None:
    kept, _ = make_case("0.9", rule="top-k", top_k=0.1).measure_read()
    assert kept == pytest.approx(0.1, abs=0.01)


def test_bytes_per_layer_are_those_of_the_tensors() -> None:
    options = SparseDecodeOptions(min_context=0)
    case = StepCase(options, GEOMETRY, batch=2, context=6000, kept=torch.full((1, 2, 2), 0.2), device="cpu")
    pages, padding = 2 * 94 + 1, 1
    held = sum(pool.nbytes for pool in case.pools[0]) + case.step.summaries.bytes
    assert bytes_per_layer(GEOMETRY, options, 2, 6000) == held * (pages - padding) // pages


def test_layers_are_limited_by_need_and_by_memory() -> None:
    assert command.choose_layers(10**9, 10**8, 10**12) == 6
    assert command.choose_layers(10**9, 10**9, 10**12) == command.MIN_LAYERS
    assert command.choose_layers(10**6, 10, 10**12) == command.MAX_LAYERS
    assert command.choose_layers(10**9, 10**9, 2 * 10**9) == 1
    assert command.choose_layers(10**9, 10**9, 10**9) == 0


def test_kernel_times_are_summed_by_name() -> None:
    events = [(0.0, 10.0, "scan"), (12.0, 13.0, "rule"), (15.0, 25.0, "scan"), (26.0, 28.0, "rule")]
    kernels, span = summarise(events, layers=2)
    assert [(k.name, k.calls, k.microseconds) for k in kernels] == [("scan", 1, 10), ("rule", 1, 1.5)]
    assert span == 14
    shown = kernel_table(kernels, span)
    assert "between kernels" in shown
    assert "2.50" in shown
    assert "no kernel" in kernel_table(*summarise([], 2))


def test_a_forecast_that_selects_is_refused() -> None:
    given = ["--sparse-decode", "--sparse-decode-preset", "sparda"]
    with pytest.raises(BenchmarkError, match="--sparse-decode-select-by forecast: a step here has no model"):
        command.main(given)
