"""Inputs, timing and tables that the kernel benchmarks share.

Times are medians over replays of a CUDA graph that runs the operation on several input sets in turn. The sets read
different pages and together exceed the L2 cache several times, so that every byte comes from memory, as it does between
the layers of a model. Every operation is compared with its torch reference before it is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from benchmarks.kept_fractions import draw_kept, is_number
from benchmarks.results import Row, text_table

ROTATED_BYTES = 384 * 2**20
"""What the input sets of a case read together, at least: several times the L2 cache of any current GPU."""

MAX_SETS = 24


@dataclass(frozen=True)
class Measurement:
    """One row of a table. `bytes` is what any implementation must move for the case; None for what only prepares."""

    operation: str
    case: str
    batch: int
    context: int
    kept: float | None
    seconds: float
    bytes: int | None
    impl: str = "sparse_kernels"


@dataclass(frozen=True)
class Batch:
    """The per-step inputs of a decode batch: `q [B, Hq, D]`, `page_table [B, max_pages]`, `seq_lens [B]`."""

    q: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor

    def request(self, b: int) -> Batch:
        """The batch of request `b` alone."""
        one = slice(b, b + 1)
        return Batch(self.q[one], self.page_table[one], self.seq_lens[one])

    @property
    def size(self) -> int:
        return self.q.shape[0]

    @property
    def tokens(self) -> int:
        return int(self.seq_lens.sum())


@dataclass(frozen=True)
class Suite:
    """The shapes to measure, by default those of Llama-3.1-8B, and a pool of random keys and values for all of them."""

    batches: tuple[int, ...] = (1, 4, 8, 64)
    contexts: tuple[int, ...] = (32_768, 130_000)
    kept: tuple[str, ...] = ("0.1", "0.3", "1")
    """Shares of blocks that attention reads, as `kept_fractions` takes them."""
    peers: tuple[str, ...] = ()
    """Other implementations of attention to time too."""
    room: int = 0
    """Tokens that each row has room for at least, as in a server of longer contexts."""
    num_kv_heads: int = 8
    group_size: int = 4
    head_dim: int = 128
    page_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def blocks_per_page(self) -> int:
        return self.page_size // self.block_size

    @property
    def head_bytes(self) -> int:
        """Bytes of one token's key of one head."""
        return self.head_dim * self.dtype.itemsize

    @cached_property
    def num_pages(self) -> int:
        """Pages of the largest case or of `ROTATED_BYTES` of keys, whichever is more, and the padding page."""
        largest = max(self.batches) * -(-max(self.contexts) // self.page_size)
        page_bytes = self.page_size * self.num_kv_heads * self.head_bytes
        return 1 + max(largest, -(-ROTATED_BYTES // page_bytes))

    @cached_property
    def k_pool(self) -> torch.Tensor:
        return self._random_pool(1)

    @cached_property
    def v_pool(self) -> torch.Tensor:
        return self._random_pool(2)

    def _random_pool(self, seed: int) -> torch.Tensor:
        shape = (self.num_pages * self.page_size, self.num_kv_heads, self.head_dim)
        rng = torch.Generator(self.device).manual_seed(seed)
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=rng)

    @cached_property
    def _page_order(self) -> torch.Tensor:
        rng = torch.Generator().manual_seed(3)
        order = torch.randperm(self.num_pages - 1, generator=rng) + 1
        return order.to(device=self.device, dtype=torch.int32)

    def cases(self) -> Iterable[tuple[int, int]]:
        """Batch size and context of every case."""
        return ((batch, context) for batch in self.batches for context in self.contexts)

    def batch(self, size: int, context: int, index: int = 0) -> Batch:
        """Input set `index`: slightly ragged lengths up to `context`, pages scattered over the pool and, while the pool
        lasts, other than those of the other sets."""
        columns = -(-context // self.page_size)
        start = index * size * columns
        places = (start + torch.arange(size * columns, device=self.device)) % (self.num_pages - 1)
        page_table = self._page_order[places].view(size, columns)
        beyond = self.capacity(context) // self.blocks_per_page - columns
        rng = torch.Generator(self.device).manual_seed(index)
        q = torch.randn(
            size,
            self.num_kv_heads * self.group_size,
            self.head_dim,
            generator=rng,
            dtype=self.dtype,
            device=self.device,
        )
        lengths = [max(context - 61 * b, 1) for b in range(size)]
        return Batch(
            q=q,
            page_table=torch.nn.functional.pad(page_table, (0, beyond)),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
        )

    def input_sets(self, size: int, context: int, bytes_read: int) -> list[Batch]:
        """As many input sets as it takes to read `ROTATED_BYTES`, given what one of them reads."""
        count = min(max(-(-ROTATED_BYTES // max(bytes_read, 1)), 1), MAX_SETS)
        return [self.batch(size, context, index) for index in range(count)]

    def blocks(self, context: int) -> int:
        """Blocks of a row of `context` tokens, rounded up to whole pages: what operations have to read."""
        return -(-context // self.page_size) * self.blocks_per_page

    def capacity(self, context: int) -> int:
        """Blocks that a row has room for."""
        return -(-max(context, self.room) // self.page_size) * self.blocks_per_page

    def random_lists(self, batch: Batch, kept: float | str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Ascending random lists of about the share `kept` of each row's blocks.

        A number lets rows keep between half and one and a half times as much, as heads differ; a profile or `lognormal`
        (`kept_fractions.draw_kept`) says itself what each row keeps.
        """
        rng = torch.Generator(self.device).manual_seed(seed)
        capacity = batch.page_table.shape[1] * self.blocks_per_page
        shape = (batch.size, self.num_kv_heads, capacity)
        drawn = draw_kept(str(kept), batch.size * self.num_kv_heads, seed).view(*shape[:2], 1)
        share = drawn.to(self.device)
        if is_number(kept):
            share = share * (0.5 + torch.rand(*shape[:2], 1, generator=rng, device=self.device))
        index = torch.arange(capacity, device=self.device, dtype=torch.int32)
        blocks = (batch.seq_lens + self.block_size - 1) // self.block_size
        chosen = (torch.rand(shape, generator=rng, device=self.device) < share) & (index < blocks[:, None, None])
        chosen[:, :, 0] = True
        lists = torch.where(chosen, index, capacity).sort(dim=-1).values
        return lists.contiguous(), chosen.sum(-1, dtype=torch.int32)


@triton.jit
def _read_kernel(source, sums, PER_PROGRAM: tl.constexpr, CHUNK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * PER_PROGRAM
    total = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, PER_PROGRAM, CHUNK):
        total += tl.load(source + start + first + tl.arange(0, CHUNK))
    tl.store(sums + tl.program_id(0), tl.sum(total))


def measure_read_rate(device: str = "cuda") -> float:
    """Bytes a second of the fastest of several reductions over 4 GiB: what a kernel that only reads can reach."""
    count = 2**30
    source = torch.zeros(count, dtype=torch.int32, device=device)
    sums = torch.empty(2**15, dtype=torch.int32, device=device)
    calls = []
    for per_program, chunk, warps in ((2**15, 4096, 4), (2**16, 4096, 8), (2**17, 8192, 8), (2**18, 8192, 4)):

        def read(per_program: int = per_program, chunk: int = chunk, warps: int = warps) -> None:
            _read_kernel[(count // per_program,)](source, sums, PER_PROGRAM=per_program, CHUNK=chunk, num_warps=warps)

        calls.append(read)
    return source.nbytes / min(time_in_turn([call]) for call in calls)


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One CUDA graph of all calls, each of which ran once before."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_in_turn(calls: Sequence[Callable[[], object]], seconds: float = 0.04, repeats: int = 5) -> float:
    """Seconds of one call: median of `repeats` runs of about `seconds` in all, each replaying a graph of all calls."""
    graph = capture(calls)

    def replay(times: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / times

    replay(1)
    times = max(1, round(seconds / repeats / replay(1)))
    return statistics.median(replay(times) for _ in range(repeats)) / len(calls)


def time_eagerly(calls: Sequence[Callable[[], object]], rounds: int = 3, repeats: int = 5) -> float:
    """Seconds of one call that cannot be captured: median of `repeats` runs of all calls `rounds` times."""
    for call in calls:
        call()

    def run() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(rounds):
            for call in calls:
                call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / rounds

    return statistics.median(run() for _ in range(repeats)) / len(calls)


def time_on_host(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Seconds of wall time of one call, the device waited for before and after: median of `repeats` runs of each."""
    times = []
    for call in calls:
        call()
        for _ in range(repeats):
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def check_close(what: str, result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Raises RuntimeError unless the relative error, in the Euclidean norm, is at most `tolerance`."""
    error = (result.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    if not error <= tolerance:
        raise RuntimeError(f"{what}: relative error {error:.2e} against the reference, allowed {tolerance:.0e}")


def table(measurements: Sequence[Measurement], read_rate: float) -> str:
    """The measurements as aligned text; `read_rate` in bytes a second."""
    head = ("operation", "impl", "case", "batch", "context", "kept", "ms", "MB", "GB/s", "of read rate")
    rows = [
        (
            m.operation,
            m.impl,
            m.case,
            str(m.batch),
            str(m.context),
            "" if m.kept is None else f"{m.kept:.0%}",
            f"{m.seconds * 1e3:.4f}",
            "" if m.bytes is None else f"{m.bytes / 1e6:.2f}",
            "" if m.bytes is None else f"{m.bytes / m.seconds / 1e9:.0f}",
            "" if m.bytes is None else f"{m.bytes / m.seconds / read_rate:.1%}",
        )
        for m in measurements
    ]
    return text_table(head, rows, left=3)


def result_rows(measurements: Iterable[Measurement], read_rate: float) -> list[Row]:
    """The measurements as rows of the results file."""
    return [
        Row(
            "kernel",
            f"{m.operation}: {m.case}",
            m.batch,
            m.context,
            m.impl,
            m.seconds * 1e3,
            m.kept,
            m.bytes,
            None if m.bytes is None else m.bytes / m.seconds / read_rate,
        )
        for m in measurements
    ]
