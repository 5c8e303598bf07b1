"""Where the time of a captured step goes: device time of each kernel, by torch.profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.results import text_table


@dataclass(frozen=True)
class KernelTime:
    """One kernel of a layer: calls in a layer, microseconds a layer in all of them."""

    name: str
    calls: float
    microseconds: float


def profile_graph(graph: torch.cuda.CUDAGraph, layers: int, replays: int = 20) -> tuple[list[KernelTime], float]:
    """Kernels of one layer in the order in which they first run, and the microseconds a layer from first to last.

    The second number includes the gaps between kernels. Without kernels the list is empty: the driver then does not let
    this process use its profiling counters.
    """
    from torch.profiler import ProfilerActivity, profile

    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    return summarise(events, layers * replays)


def summarise(events: Iterable[tuple[float, float, str]], layers: int) -> tuple[list[KernelTime], float]:
    """As `profile_graph`, from (start, end, name) in microseconds, sorted; `layers` counts all replays' layers."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    first, last = float("inf"), 0.0
    for start, end, name in events:
        first, last = min(first, start), max(last, end)
        totals[name][0] += 1
        totals[name][1] += end - start
    if not totals:
        return [], 0.0
    return [KernelTime(name, calls / layers, time / layers) for name, (calls, time) in totals.items()], (
        last - first
    ) / layers


def kernel_table(kernels: list[KernelTime], span: float) -> str:
    """The kernels of a layer as text, with the gaps between them."""
    if not kernels:
        return "the profiler saw no kernel: the driver may restrict its counters"
    busy = sum(kernel.microseconds for kernel in kernels)
    rows = [
        (kernel.name[:64], f"{kernel.calls:g}", f"{kernel.microseconds:.2f}", f"{kernel.microseconds / span:.1%}")
        for kernel in kernels
    ]
    rows.append(("between kernels", "", f"{span - busy:.2f}", f"{(span - busy) / span:.1%}"))
    rows.append(("a layer", "", f"{span:.2f}", ""))
    return text_table(("kernel", "calls", "us a layer", "share"), rows)
