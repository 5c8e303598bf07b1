"""How `fused_top_delta` shares its work, and the buffers that its programs leave parts in and keep notes in.

The work of a KV head is a sequence of units, one for each page of each request, in equal shares (`_work_split`), or in
shares by what the rows kept before (`_fused_shares`): share `i` of head `h` is that of program `i * Hkv + h`, whose
buffers are number `h * n + i`, with `n` shares a head, so that those of a row lie side by side. A program works on the
pages of one row at a time, `CHUNK` of them at most: it scans them, lists the blocks to keep, and attends to those.
Consecutive units are pages that lie far apart in the row (`row_page`), because blocks that are kept lie together: a run
of pages would leave one program with most of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _work_split as work_split
from ._attention_plan import AttentionWorkspace
from ._checks import check_contiguous, check_dtype, check_shape, check_sizes
from ._dispatch import planned_programs

CHUNK = 64
"""Pages that a program scans before it attends to what it kept of them."""

REGISTERS = 65536
"""Of a multiprocessor, shared by the threads of its programs in eights."""

STRANDS = tl.constexpr(32)
"""Parts of a row that consecutive units take their pages from in turn."""

CLOSED = tl.constexpr(1 << 30)
"""Bit of a page's notes: it has a summary to scan. The lowest bits are its forced blocks."""


@dataclass(frozen=True)
class FusedConfig:
    """Launch options of the kernel."""

    tile: int
    """Tokens that are attended to together."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    registers: int | None
    """Registers of a thread at most, so that this many programs run on a multiprocessor."""


def fused_config(group_size: int, head_dim: int, page_size: int, block_size: int, dtype: torch.dtype) -> FusedConfig:
    """The options for these sizes and a KV dtype.

    A warp scans a page of 64 tokens and 128 channels for four heads; more share a program only for larger tiles, since
    they meet at barriers for every page. Two of five stages are those of the tile's place, so that two tiles are in
    flight while one is worked on.
    """
    half = dtype.itemsize == 2
    size = page_size * triton.next_power_of_2(head_dim) * max(4, triton.next_power_of_2(group_size))
    warps = min(8, max(1, size // (8192 * 4)) * (1 if half else 4))
    programs = max(2, 8 // warps)
    return FusedConfig(
        tile=max(16, min(block_size, 4096 // (triton.next_power_of_2(head_dim) * dtype.itemsize))),
        num_warps=warps,
        num_stages=5,
        programs_per_sm=programs,
        registers=min(255, REGISTERS // (32 * warps * programs) // 8 * 8),
    )


def default_programs(config: FusedConfig, kv_heads: int, device: torch.device | str) -> int:
    """The grid of these launch options on a device."""
    return planned_programs(torch.empty(0, device=device), config.programs_per_sm, kv_heads)


@dataclass(frozen=True)
class FusedWorkspace:
    """Caller-owned buffers; one workspace serves any batch and any layer in turn.

    Attributes:
        parts: what programs leave of rows that they share; see `AttentionWorkspace`.
        counts: `[2 * num_programs]` int32, blocks kept in each part.
        notes: `[num_programs, CHUNK]` int64: physical page in the upper half, `CLOSED` and forced blocks in the lower.
        kept_bits: `[num_programs, CHUNK]` int32: bit j for a page's block j.
        slots: `[num_programs, CHUNK * blocks of a page]` int32: first slots of the kept blocks.
        dropped: `[num_programs, CHUNK * cells of a page, G]` fp32: mass of the dropped blocks, over that of a token at
            the pseudo-maximum.
        spans: `[rows, 2]` int32, numbers of the first and last program of each row; see `_fused_shares`.
    """

    parts: AttentionWorkspace
    counts: torch.Tensor
    notes: torch.Tensor
    kept_bits: torch.Tensor
    slots: torch.Tensor
    dropped: torch.Tensor
    spans: torch.Tensor

    @classmethod
    def create(
        cls,
        kv_heads: int,
        group_size: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        page_size: int,
        block_size: int,
        device: torch.device | str,
        cells: int = 1,
        rows: int = 0,
        num_programs: int | None = None,
        config: FusedConfig | None = None,
    ) -> FusedWorkspace:
        """Allocates a workspace.

        Args:
            kv_heads: `Hkv`; each gets the same number of programs.
            group_size: `G`, query heads of a KV head, 1 to 16.
            head_dim: `D`.
            dtype: of the KV pool.
            page_size, block_size: tokens of a page and of a block.
            cells: cells of a page that have a mean value of their own, where there is a tail.
            rows: requests times KV heads of the largest batch, where what rows kept before is given (`last_kept`).
            device: where the kernels run.
            num_programs: size of the grid, at least `kv_heads`; None for what the device and the launch options give.
            config: launch options that the workspace is for; None for the default.

        Raises:
            ValueError: a size is out of range.
        """
        check_sizes(page_size, block_size)
        config = config or fused_config(group_size, head_dim, page_size, block_size, dtype)
        programs = num_programs or default_programs(config, kv_heads, device)

        def int32(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(
            parts=AttentionWorkspace.create(programs, group_size, head_dim, device),
            counts=int32(2 * programs),
            notes=torch.empty(programs, CHUNK, dtype=torch.int64, device=device),
            kept_bits=int32(programs, CHUNK),
            slots=int32(programs, CHUNK * (page_size // block_size)),
            dropped=torch.empty(programs, CHUNK * cells, group_size, dtype=torch.float32, device=device),
            spans=int32(rows, 2),
        )

    @property
    def num_programs(self) -> int:
        return self.parts.num_programs

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        own = (self.counts, self.notes, self.kept_bits, self.slots, self.dropped, self.spans)
        return self.parts.nbytes + sum(tensor.nbytes for tensor in own)

    def check(self, kv_heads: int, group_size: int, head_dim: int, page_size: int, block_size: int, cells: int) -> None:
        """Raises ValueError unless the buffers fit these sizes."""
        n = self.num_programs
        if n < kv_heads:
            raise ValueError(f"workspace has {n} programs; needed: one for each of {kv_heads} KV heads")
        check_shape("workspace.parts.partial_out", self.parts.partial_out, 2 * n, group_size, head_dim)
        check_shape("workspace.counts", self.counts, 2 * n)
        check_shape("workspace.notes", self.notes, n, CHUNK)
        check_dtype("workspace.notes", self.notes, torch.int64)
        check_shape("workspace.kept_bits", self.kept_bits, n, CHUNK)
        check_shape("workspace.slots", self.slots, n, CHUNK * (page_size // block_size))
        check_shape("workspace.dropped", self.dropped, n, None, group_size)
        if self.dropped.shape[1] < CHUNK * cells:
            raise ValueError(f"workspace.dropped has room for {self.dropped.shape[1]} cells; needed: {CHUNK * cells}")
        for name in ("counts", "kept_bits", "slots", "spans"):
            check_dtype(f"workspace.{name}", getattr(self, name), torch.int32)
        for name in ("counts", "notes", "kept_bits", "slots", "dropped", "spans"):
            check_contiguous(f"workspace.{name}", getattr(self, name))


@triton.jit
def row_page(units, row_pages):
    """The page of a row's unit: a permutation of `range(row_pages)`.

    The row is cut into strands of equal length, the last one possibly shorter; units take one page of each in turn.
    """
    length = (row_pages + STRANDS - 1) // STRANDS
    strands = (row_pages + length - 1) // length
    last = row_pages - (strands - 1) * length
    # The first `last` columns have a page in each strand, the others in all but the last strand.
    rest = units - last * strands
    others = tl.maximum(strands - 1, 1)
    column = tl.where(rest < 0, units // strands, last + rest // others)
    strand = tl.where(rest < 0, units % strands, rest % others)
    return strand * length + column


@triton.jit
def row_parts(row, batch, kv_heads, shares, seq_lens, PAGE: tl.constexpr, REQUESTS: tl.constexpr):
    """Units of a row, and the first and last buffers of the programs that work on it; meaningless if it has none."""
    b = row // kv_heads
    total = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    own = tl.zeros((), tl.int32)
    for start in range(0, batch, REQUESTS):
        requests = start + tl.arange(0, REQUESTS)
        lengths = tl.load(seq_lens + requests, mask=requests < batch, other=0)
        units = work_split.row_units(lengths, 0, PAGE, 1)
        total += tl.sum(units)
        before += tl.sum(tl.where(requests < b, units, 0))
        own += tl.sum(tl.where(requests == b, units, 0))
    share = tl.maximum(tl.cdiv(total, shares), 1)
    first = row % kv_heads * shares
    return own, first + before // share, first + (before + own - 1) // share
