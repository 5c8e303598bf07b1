"""Lists the blocks that a forecast expects to be read and that are in no slot of a cache, as far as a budget goes.

Two launches. The first turns a row's log masses into shares of the attention, and each share into one of 512 bins, of a
16th's width: the upper bits of its fp32 pattern. The second finds the bin at which all rows together reach the budget,
and lists what lies above it; of that bin, the first rows' first blocks. No row waits for another, and what is chosen
does not depend on the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import (
    MAX_GROUP_SIZE,
    check_contiguous,
    check_dtype,
    check_inner_contiguous,
    check_rows,
    check_shape,
    check_sizes,
)
from ._dispatch import use_triton

BINS = 512
"""Bin 0 is for what is no candidate; the others are shares from 2**-32, and below, up to 1."""

_SHIFT = 19
_FIRST = (0x3F800000 >> _SHIFT) - (BINS - 1)
"""Upper bits of the share that bin 0 would stand for: 1 is in the last bin."""

_TILE = 8192
"""Masses that a program reads at a time."""


@dataclass(frozen=True)
class ExpectedWorkspace:
    """What one launch leaves to the other.

    Attributes:
        bins: `[B, Hkv, N]` int16: each block's bin.
        row_counts: `[B, Hkv, BINS]` int32: blocks in each bin.
        counts: `[BINS]` int32: their sum over rows.
    """

    bins: torch.Tensor
    row_counts: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def create(cls, requests: int, kv_heads: int, blocks: int, device: torch.device | str) -> ExpectedWorkspace:
        """For up to `requests` requests of at most `blocks` blocks."""
        return cls(
            torch.zeros((requests, kv_heads, blocks), dtype=torch.int16, device=device),
            torch.zeros((requests, kv_heads, BINS), dtype=torch.int32, device=device),
            torch.zeros(BINS, dtype=torch.int32, device=device),
        )

    @staticmethod
    def bytes(requests: int, kv_heads: int, blocks: int) -> int:
        """What `create` allocates."""
        return requests * kv_heads * (blocks * 2 + BINS * 4) + BINS * 4


def expected_blocks_reference(
    log_mass: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_map: torch.Tensor,
    *,
    budget: torch.Tensor,
    part: tuple[int, int, int] = (0, 1, 1),
    page_size: int,
    block_size: int,
    min_context: int,
    workspace: ExpectedWorkspace,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
) -> None:
    """Torch reference of `expected_blocks`; leaves the workspace as it is."""
    batch, capacity = log_mass.shape[0], log_mass.shape[3]
    per_page = page_size // block_size
    lengths = seq_lens[:batch].long()
    index = torch.arange(capacity, device=log_mass.device)
    inside = index < (lengths // page_size * per_page)[:, None]
    seen = index < ((lengths + block_size - 1) // block_size)[:, None]
    pages = page_table[:batch].long().repeat_interleave(per_page, 1)[:, :capacity]
    blocks = torch.where(inside, pages * per_page + index % per_page, 0)
    absent = (slot_map[:, blocks] < 0).transpose(0, 1) & inside[:, None]
    shares = log_mass.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1).nan_to_num(0.0).mean(2)
    shares = torch.where((lengths < min_context)[:, None, None], 1.0, shares)
    bins = ((shares.contiguous().view(torch.int32) >> _SHIFT) - _FIRST).clamp(1, BINS - 1)
    bins = torch.where(absent & (shares > 0), bins, 0)
    best = bins.flatten().sort(descending=True, stable=True)
    chosen = torch.zeros_like(best.values, dtype=torch.bool)
    start, stop, of = part
    own = int(budget) * stop // of - int(budget) * start // of
    chosen[best.indices[:own]] = best.values[:own] > 0
    request, head, block = chosen.view_as(bins).nonzero(as_tuple=True)
    place = chosen.view_as(bins).cumsum(-1)[request, head, block] - 1
    block_lists[request, head, place] = block.to(torch.int32)
    block_counts[:batch] = chosen.view_as(bins).sum(-1, dtype=torch.int32)


@triton.jit
def _load_masses(row, vector_stride, index, end, R: tl.constexpr, VECTORS: tl.constexpr):
    """Masses `[VECTORS, CHUNK]`; -inf beyond R and `end`, +inf for what is no number."""
    vectors = tl.arange(0, VECTORS)[:, None]
    mask = (vectors < R) & (index < end)[None, :]
    masses = tl.load(row + vectors * vector_stride + index[None, :], mask=mask, other=float("-inf"))
    return tl.where(masses == masses, masses, float("inf"))


@triton.jit(do_not_specialize=["min_context"])
def _bin_kernel(
    log_mass,
    page_table,
    seq_lens,
    slot_map,
    bins,
    row_counts,
    counts,
    mass_stride_b,
    mass_stride_h,
    mass_stride_r,
    page_table_stride,
    bins_stride_b,
    bins_stride_h,
    pool_blocks,
    min_context,
    FIRST: tl.constexpr,
    SHIFT: tl.constexpr,
    BINS: tl.constexpr,
    R: tl.constexpr,
    VECTORS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    PER_PAGE: tl.constexpr = PAGE // BLOCK
    length = tl.load(seq_lens + b)
    end = length // PAGE * PER_PAGE
    short = length < min_context
    seen = tl.where(short, 0, tl.cdiv(length, BLOCK))
    scored = tl.where(short, 0, end)
    row = log_mass + b * mass_stride_b + h * mass_stride_h
    highest = tl.full((VECTORS,), float("-inf"), tl.float32)
    total = tl.zeros((VECTORS,), tl.float32)
    for start in range(0, seen, CHUNK):
        masses = _load_masses(row, mass_stride_r, start + tl.arange(0, CHUNK), seen, R, VECTORS)
        above = tl.maximum(highest, tl.max(masses, 1))
        shift = tl.where(tl.abs(above) == float("inf"), 0.0, above)
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(masses - shift[:, None]), 1)
        highest = above
    # Of a vector whose masses are no numbers nothing is expected.
    valid = tl.abs(highest) != float("inf")
    shift = tl.where(valid, highest, 0.0)
    scale = tl.where(valid, 1 / (tl.where(valid, total, 1.0) * R), 0.0)
    number = tl.arange(0, BINS)
    own = tl.zeros((BINS,), tl.int32)
    for start in range(0, end, CHUNK):
        index = start + tl.arange(0, CHUNK)
        inside = index < end
        page = tl.load(page_table + b * page_table_stride + index // PER_PAGE, mask=inside, other=0).to(tl.int64)
        slot = tl.load(slot_map + h * pool_blocks + page * PER_PAGE + index % PER_PAGE, mask=inside, other=0)
        masses = _load_masses(row, mass_stride_r, index, scored, R, VECTORS)
        parts = tl.where(valid[:, None], tl.exp(masses - shift[:, None]) * scale[:, None], 0.0)
        share = tl.where(short, 1.0, tl.sum(parts, 0))
        pattern = (share.to(tl.int32, bitcast=True) >> SHIFT) - FIRST
        chosen = tl.minimum(tl.maximum(pattern, 1), BINS - 1)
        chosen = tl.where(inside & (slot < 0) & (share > 0), chosen, 0)
        tl.store(bins + b * bins_stride_b + h * bins_stride_h + index, chosen.to(tl.int16), mask=inside)
        own += tl.histogram(chosen, BINS)
    own = tl.where(number == 0, 0, own)
    tl.store(row_counts + (b * tl.num_programs(1) + h) * BINS + number, own)
    tl.atomic_add(counts + number, own, mask=own > 0)


@triton.jit(do_not_specialize=["part_start", "part_stop", "part_of"])
def _list_kernel(
    bins,
    row_counts,
    counts,
    seq_lens,
    lists,
    list_counts,
    bins_stride_b,
    bins_stride_h,
    lists_stride_b,
    lists_stride_h,
    budgets,
    part_start,
    part_stop,
    part_of,
    BINS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    number = tl.arange(0, BINS)
    whole = tl.load(budgets).to(tl.int64)
    budget = (whole * part_stop // part_of - whole * part_start // part_of).to(tl.int32)
    each = tl.load(counts + number)
    # The bin at which the budget is reached; 0, which is nobody's, if it is not.
    edge = tl.max(tl.where(tl.cumsum(each, 0, reverse=True) >= budget, number, 0), 0)
    left = budget - tl.sum(tl.where(number > edge, each, 0), 0)
    for start in range(0, row, BINS):
        others = start + number
        left -= tl.sum(tl.load(row_counts + others.to(tl.int64) * BINS + edge, mask=others < row, other=0), 0)
    end = tl.load(seq_lens + b) // PAGE * (PAGE // BLOCK)
    count = tl.zeros((), tl.int32)
    seen = tl.zeros((), tl.int32)
    for start in range(0, end, CHUNK):
        index = start + tl.arange(0, CHUNK)
        own = tl.load(bins + b * bins_stride_b + h * bins_stride_h + index, mask=index < end, other=0).to(tl.int32)
        tied = ((own == edge) & (edge > 0)).to(tl.int32)
        taken = (own > edge) | ((tied > 0) & (seen + tl.cumsum(tied, 0) <= left))
        places = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(lists + b * lists_stride_b + h * lists_stride_h + places, index, mask=taken)
        count += tl.sum(taken.to(tl.int32), 0)
        seen += tl.sum(tied, 0)
    tl.store(list_counts + row, count)


def _expected_blocks_triton(
    log_mass: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_map: torch.Tensor,
    *,
    budget: torch.Tensor,
    part: tuple[int, int, int] = (0, 1, 1),
    page_size: int,
    block_size: int,
    min_context: int,
    workspace: ExpectedWorkspace,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
) -> None:
    batch, kv_heads, vectors, _ = log_mass.shape
    if batch == 0:
        return
    rows = triton.next_power_of_2(vectors)
    workspace.counts.zero_()
    _bin_kernel[(batch, kv_heads)](
        log_mass,
        page_table,
        seq_lens,
        slot_map,
        workspace.bins,
        workspace.row_counts,
        workspace.counts,
        *log_mass.stride()[:3],
        page_table.stride(0),
        *workspace.bins.stride()[:2],
        slot_map.shape[1],
        min_context,
        FIRST=_FIRST,
        SHIFT=_SHIFT,
        BINS=BINS,
        R=vectors,
        VECTORS=rows,
        PAGE=page_size,
        BLOCK=block_size,
        CHUNK=_TILE // rows,
        num_warps=8,
    )
    _list_kernel[(batch, kv_heads)](
        workspace.bins,
        workspace.row_counts,
        workspace.counts,
        seq_lens,
        block_lists,
        block_counts,
        *workspace.bins.stride()[:2],
        *block_lists.stride()[:2],
        budget,
        *part,
        BINS=BINS,
        PAGE=page_size,
        BLOCK=block_size,
        CHUNK=2048,
        num_warps=4,
    )


def expected_blocks(
    log_mass: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_map: torch.Tensor,
    *,
    budget: torch.Tensor,
    part: tuple[int, int, int] = (0, 1, 1),
    page_size: int,
    block_size: int,
    min_context: int,
    workspace: ExpectedWorkspace,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Lists the blocks that are expected to have the largest share of their row's attention, over all rows as many as
    the budget says.

    A block's share is the mean over the R vectors of its KV head of `softmax(log_mass)`, over all blocks of the row; a
    vector with a mass that is NaN or +inf counts as 0. Candidates are blocks of full pages that are in no slot and
    whose share is above 0. All blocks of rows below `min_context`, which read everything, have a share of 1. Shares
    that differ by less than a 16th may count as equal, and so do all below 2**-32; of equal ones the first row's first
    blocks are taken.

    Args:
        log_mass: `[B, Hkv, R, N]` fp32; entries of other than a row's `ceil(seq_len / block_size)` blocks are not
            read, nor are rows below `min_context`. R from 1 to 16.
        page_table: `[>=B, max_pages]` int32, physical pages.
        seq_lens: `[>=B]` int32, tokens whose keys are there, so without the one that a step is about to add; 0 for
            padded rows.
        slot_map: `[Hkv, pool blocks]` int32, see `SlotMaps`: negative for a block that is in no slot.
        budget: `[1]` int32, blocks; with 0 nothing is listed.
        part: `(start, stop, of)`: these are requests `start` to `stop` of so many that share the budget, and get what
            lies between `start / of` and `stop / of` of it: parts add up to the budget.
        page_size, block_size: tokens.
        workspace: for at least B requests of N blocks; overwritten.
        block_lists: `[>=B, Hkv, N]` int32, output: ascending block numbers.
        block_counts: `[>=B, Hkv]` int32, contiguous, output: lengths of the lists.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_sizes(page_size, block_size)
    check_shape("budget", budget, 1)
    check_dtype("budget", budget, torch.int32)
    if not 0 <= part[0] <= part[1] <= part[2] or part[2] == 0:
        raise ValueError(f"part is {part}; needed: start and stop of requests, and how many there are")
    check_shape("log_mass", log_mass, None, None, None, None)
    check_dtype("log_mass", log_mass, torch.float32)
    check_inner_contiguous("log_mass", log_mass)
    batch, kv_heads, vectors, capacity = log_mass.shape
    if not 1 <= vectors <= MAX_GROUP_SIZE:
        raise ValueError(f"log_mass has {vectors} vectors for each KV head; needed: 1 to {MAX_GROUP_SIZE}")
    for name, tensor, ndim in (("page_table", page_table, 2), ("seq_lens", seq_lens, 1)):
        check_rows(name, tensor, batch, ndim=ndim)
        check_dtype(name, tensor, torch.int32)
        check_inner_contiguous(name, tensor)
    check_shape("slot_map", slot_map, kv_heads, None)
    check_dtype("slot_map", slot_map, torch.int32)
    check_contiguous("slot_map", slot_map)
    check_rows("workspace.bins", workspace.bins, batch, ndim=3)
    check_shape("workspace.bins", workspace.bins, None, kv_heads, capacity)
    check_rows("block_lists", block_lists, batch, ndim=3)
    check_shape("block_lists", block_lists, None, kv_heads, capacity)
    check_dtype("block_lists", block_lists, torch.int32)
    check_inner_contiguous("block_lists", block_lists)
    check_rows("block_counts", block_counts, batch, ndim=2)
    check_shape("block_counts", block_counts, None, kv_heads)
    check_dtype("block_counts", block_counts, torch.int32)
    check_contiguous("block_counts", block_counts)
    run = _expected_blocks_triton if use_triton(impl, log_mass) else expected_blocks_reference
    run(
        log_mass,
        page_table,
        seq_lens,
        slot_map,
        budget=budget,
        part=part,
        page_size=page_size,
        block_size=block_size,
        min_context=min_context,
        workspace=workspace,
        block_lists=block_lists,
        block_counts=block_counts,
    )
