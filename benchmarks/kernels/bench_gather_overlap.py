"""What a gather from pinned memory costs a GEMM and sparse attention that run beside it, by size of its grid.

Bytes: those of the gather in the time of one call of the other; none where the other runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from sparse_kernels import AttentionWorkspace, block_gather

from .bench_block_gather import POOL_BYTES, PROGRAMS
from .bench_sparse_attention import attention_call
from .common import Measurement, Suite, capture
from .slots import pinned

GEMM = 4096
GATHER_SECONDS = 0.08
"""About how long the gather takes; the other work takes less, so that all of it is beside the gather."""

WORK_SECONDS = 0.03
PCIE_RATE = 50e9


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures a GEMM of the model's size, and attention of the suite's first batch and context."""
    shape = (2, suite.block_size, suite.head_dim)
    size = 2 * suite.block_size * suite.head_bytes
    total, places = POOL_BYTES // size, 4096
    source = pinned(torch.zeros((total, *shape), dtype=suite.dtype))
    target = torch.zeros((places, *shape), dtype=suite.dtype, device=suite.device)
    come_from = torch.randint(0, total, (int(GATHER_SECONDS * PCIE_RATE / size),), device=suite.device).int()
    # Places are used again and again: nobody reads them.
    go_to = torch.arange(len(come_from), dtype=torch.int32, device=suite.device) % places
    n = torch.full((1,), len(come_from), dtype=torch.int32, device=suite.device)
    a, b = (torch.randn((GEMM, GEMM), dtype=suite.dtype, device=suite.device) for _ in range(2))
    c = torch.empty_like(a)
    batch = suite.batch(suite.batches[0], suite.contexts[0])
    workspace = AttentionWorkspace.create(None, suite.group_size, suite.head_dim, suite.device)
    lists = suite.random_lists(batch, suite.kept[0])
    attention = attention_call(suite, batch, lists, workspace, torch.empty_like(batch.q))
    works: list[tuple[str, Callable[[], object]]] = [
        (f"GEMM {GEMM}", partial(torch.mm, a, b, out=c)),
        (f"sparse_attention B={batch.size} {suite.contexts[0]} kept {suite.kept[0]}", attention),
    ]
    side = torch.cuda.Stream()
    for name, work in works:
        graph = capture([work])
        times = _timed(graph, 20, lambda: None, side)[0]
        count = max(1, round(WORK_SECONDS / times))
        seconds, _ = _timed(graph, count, lambda: None, side)
        yield Measurement("gather_overlap", f"{name}, alone", batch.size, suite.contexts[0], None, seconds, None)
        for programs in PROGRAMS:
            gather = partial(block_gather, source, target, come_from, go_to, n, programs=programs)
            seconds, took = _timed(graph, count, gather, side)
            rate = len(come_from) * size / took
            case = f"{name}, beside {programs} programs at {rate / 1e9:.1f} GB/s"
            yield Measurement("gather_overlap", case, batch.size, suite.contexts[0], None, seconds, int(rate * seconds))


def _timed(
    graph: torch.cuda.CUDAGraph, count: int, beside: Callable[[], None], side: torch.cuda.Stream
) -> tuple[float, float]:
    """Seconds of one replay beside an operation on another stream, and of that operation; the fastest of three."""
    results = []
    for _ in range(3):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            events[2].record()
            beside()
            events[3].record()
        events[0].record()
        for _ in range(count):
            graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        results.append((events[0].elapsed_time(events[1]) / 1e3 / count, events[2].elapsed_time(events[3]) / 1e3))
    return min(results)
