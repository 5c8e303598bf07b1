"""Times one case of the step, and dense attention on the same keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.kernels.common import capture, check_close, time_in_turn
from benchmarks.peers import AttentionInputs, fa3
from benchmarks.results import Row, share
from benchmarks.step.case import StepCase
from benchmarks.step.kernels import kernel_table, profile_graph

HEAD = (
    "impl",
    "kept asked",
    "batch",
    "context",
    "layers",
    "ms a layer",
    "kept",
    "KV bytes",
    "MB",
    "of read rate",
    "off dense",
)


def layer_calls(case: StepCase, dense: bool) -> dict[str, list[Callable[[], object]]]:
    """By implementation, one call a layer."""
    layers = range(case.layers)
    calls: dict[str, list[Callable[[], object]]] = {
        "sparse": [lambda layer=layer: case.attend(layer) for layer in layers]
    }
    if dense:
        calls["sparse-all"] = [partial(case.attend_all, layer) for layer in layers]
        if not fa3.why_missing():
            g = case.geometry
            calls["fa3"] = [
                fa3.prepare(AttentionInputs(*case.inputs(layer), case.scale, g.page_size, g.block_size))[0].call
                for layer in layers
            ]
            check_close("FA3 against sparse_attention over all blocks", calls["fa3"][0](), case.dense_out[0], 1e-2)
    return calls


def measure(
    case: StepCase, *, kept: str, name: str, rate: float, dense: bool, with_profile: bool
) -> tuple[list[Row], list[tuple[str, ...]]]:
    """Rows for the results, and lines under `HEAD` for the eye.

    Args:
        kept: the share that was asked for.
        name: the step's `case` in the results.
        rate: measured read rate, bytes a second.
        dense: also time dense attention.
        with_profile: also print each implementation's kernels.
    """
    batch, context = case.batch, int(case.step.buffers.seq_lens[0])
    kept_now, read_now = case.measure_read()
    for layer in range(case.layers):
        case.attend_all(layer)
    off = case.difference()
    rows, lines = [], []
    for impl, calls in layer_calls(case, dense).items():
        seconds = time_in_turn(calls, seconds=0.2)
        sparse = impl == "sparse"
        moved = int((read_now if sparse else 1) * case.kv_bytes)
        shares = (kept_now, read_now) if sparse else (1.0, 1.0)
        of_rate = moved / seconds / rate
        rows.append(
            Row("step", name if sparse else "dense", batch, context, impl, seconds * 1e3, shares[0], moved, of_rate)
        )
        lines.append(
            (
                impl,
                kept if sparse else "",
                str(batch),
                str(context),
                str(case.layers),
                f"{seconds * 1e3:.4f}",
                share(shares[0]),
                share(shares[1]),
                f"{moved / 1e6:.1f}",
                share(of_rate),
                f"{off:.2%}" if sparse else "",
            )
        )
        if with_profile:
            print(f"\n{impl}, B={batch}, context {context}, kept {kept if sparse else 'all'}")
            print(kernel_table(*profile_graph(capture(calls), case.layers)), flush=True)
    return rows, lines
