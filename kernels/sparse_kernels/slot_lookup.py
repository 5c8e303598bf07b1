"""Finds listed blocks in the slots of a cache, and puts each missing block on a list once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_contiguous, check_dtype, check_inner_contiguous, check_rows, check_shape, check_sizes
from ._dispatch import use_triton
from .slot_maps import CLAIMED, NO_SLOT, OPEN, FetchList, SlotMaps, check_epoch, check_totals

_NO_SLOT: tl.constexpr = tl.constexpr(NO_SLOT)
_CLAIMED: tl.constexpr = tl.constexpr(CLAIMED)
_OPEN: tl.constexpr = tl.constexpr(OPEN)


@triton.jit
def _slot_lookup_kernel(
    page_table,
    seq_lens,
    lists,
    counts,
    epoch,
    slot_map,
    slot_stamp,
    missed_blocks,
    missed_counts,
    copies,
    locations,
    totals,
    page_table_stride,
    lists_stride_b,
    lists_stride_h,
    locations_stride_b,
    locations_stride_h,
    pool_blocks,
    slots,
    capacity,
    LAG: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * CHUNK
    if (b == 0) & (h == 0) & (first == 0):
        tl.store(copies, 0)
    length = tl.load(seq_lens + b)
    count = tl.minimum(tl.load(counts + b * tl.num_programs(1) + h), tl.cdiv(length, BLOCK))
    if first < count:
        BLOCKS_PER_PAGE: tl.constexpr = PAGE // BLOCK
        index = first + tl.arange(0, CHUNK)
        inside = index < count
        listed = tl.load(lists + b * lists_stride_b + h * lists_stride_h + index, mask=inside, other=0)
        opened = inside & (listed // BLOCKS_PER_PAGE == (length - 1) // PAGE)
        closed = inside & (listed // BLOCKS_PER_PAGE < (length - 1) // PAGE)
        page = tl.load(page_table + b * page_table_stride + listed // BLOCKS_PER_PAGE, mask=closed, other=0)
        block = page * BLOCKS_PER_PAGE + listed % BLOCKS_PER_PAGE
        places = slot_map + h * pool_blocks + block
        slot = tl.load(places, mask=closed, other=_CLAIMED)
        hit = closed & (slot >= 0)
        tl.store(slot_stamp + h * slots + slot, tl.load(epoch) - LAG, mask=hit)
        # Nobody gives slots meanwhile, so a block that was seen free is free or claimed: of all that exchange, one
        # gets the free value back.
        free = closed & (slot == _NO_SLOT)
        claims = tl.full((CHUNK,), _CLAIMED, tl.int32)
        won = free & (tl.atomic_xchg(places, claims, mask=free) == _NO_SLOT)
        misses = tl.sum(won.to(tl.int32))
        if misses > 0:
            at = tl.atomic_add(missed_counts + h, misses) + tl.cumsum(won.to(tl.int32), 0) - 1
            tl.store(missed_blocks + h * capacity + at, block, mask=won & (at < capacity))
            tl.store(places, tl.full((CHUNK,), _NO_SLOT, tl.int32), mask=won & (at >= capacity))
        if locations is not None:
            location = tl.where(hit, slot, -1 - block)
            location = tl.where(opened, _OPEN - listed % BLOCKS_PER_PAGE, location)
            tl.store(
                locations + b * locations_stride_b + h * locations_stride_h + index, location, mask=closed | opened
            )
        if totals is not None:
            tl.atomic_add(totals, tl.sum(hit.to(tl.int64)))
            tl.atomic_add(totals + 1, misses.to(tl.int64))


def slot_lookup(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    epoch: torch.Tensor,
    maps: SlotMaps,
    fetch: FetchList,
    *,
    lag: int,
    page_size: int,
    block_size: int,
    locations: torch.Tensor | None = None,
    totals: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Looks every listed block of every row up in one layer's slots.

    A block that is in a slot stamps it. A block that is in none is claimed and put on `fetch.blocks` once, however many
    rows list it (requests share prefixes); beyond the list's capacity it stays unclaimed. Blocks of the page that the
    request's last token is in are not looked up.

    Args:
        page_table: `[>=B, max_pages]` int32, physical pages.
        seq_lens: `[B]` int32, tokens of each request, this step's included; 0 marks a padded row, which does nothing.
        block_lists: `[>=B, Hkv, N]` int32, logical blocks of the request, unique.
        block_counts: `[>=B, Hkv]` int32, contiguous.
        epoch: `[1]` int32, number of the step.
        maps: the layer's maps; stamps and claims are written.
        fetch: its `blocks` and `counts` get the misses, in any order; `copies` becomes 0. `counts` must be 0 before.
        lag: stamps say `epoch - lag`: 0 for what attention reads, 1 for what is only expected.
        page_size, block_size: tokens.
        locations: `[>=B, Hkv, N]` int32, output, for each listed block: its slot; `-1 - pool block` if it is in none;
            `OPEN - i` for the i-th block of the request's last page.
        totals: `[4]` int64, see `slot_maps.TOTALS`; hits and misses are added to.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    batch = seq_lens.shape[0]
    check_sizes(page_size, block_size)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_rows("page_table", page_table, batch, ndim=2)
    check_dtype("page_table", page_table, torch.int32)
    check_inner_contiguous("page_table", page_table)
    check_rows("block_lists", block_lists, batch, ndim=3)
    check_dtype("block_lists", block_lists, torch.int32)
    check_inner_contiguous("block_lists", block_lists)
    kv_heads = block_lists.shape[1]
    check_rows("block_counts", block_counts, batch, ndim=2)
    check_shape("block_counts", block_counts, None, kv_heads)
    check_dtype("block_counts", block_counts, torch.int32)
    check_contiguous("block_counts", block_counts)
    check_epoch(epoch)
    maps.check(kv_heads, page_size // block_size)
    fetch.check(kv_heads)
    if lag not in (0, 1):
        raise ValueError(f"lag is {lag}; allowed: 0, 1")
    if locations is not None:
        check_rows("locations", locations, batch, ndim=3)
        check_shape("locations", locations, None, *block_lists.shape[1:])
        check_dtype("locations", locations, torch.int32)
        check_inner_contiguous("locations", locations)
    check_totals(totals)
    run = _slot_lookup_triton if use_triton(impl, seq_lens) else slot_lookup_reference
    run(
        page_table,
        seq_lens,
        block_lists,
        block_counts,
        epoch,
        maps,
        fetch,
        lag=lag,
        page_size=page_size,
        block_size=block_size,
        locations=locations,
        totals=totals,
    )


def _slot_lookup_triton(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    epoch: torch.Tensor,
    maps: SlotMaps,
    fetch: FetchList,
    *,
    lag: int,
    page_size: int,
    block_size: int,
    locations: torch.Tensor | None,
    totals: torch.Tensor | None,
) -> None:
    batch, (_, kv_heads, width) = seq_lens.shape[0], block_lists.shape
    if batch == 0:
        fetch.copies.zero_()
        return
    chunk = min(512, max(32, triton.next_power_of_2(width)))
    _slot_lookup_kernel[(batch, kv_heads, triton.cdiv(max(width, 1), chunk))](
        page_table,
        seq_lens,
        block_lists,
        block_counts,
        epoch,
        maps.slot_map,
        maps.slot_stamp,
        fetch.blocks,
        fetch.counts,
        fetch.copies,
        locations,
        totals,
        page_table.stride(0),
        *block_lists.stride()[:2],
        *((0, 0) if locations is None else locations.stride()[:2]),
        maps.slot_map.shape[1],
        maps.slots,
        fetch.capacity,
        LAG=lag,
        PAGE=page_size,
        BLOCK=block_size,
        CHUNK=chunk,
        num_warps=4,
    )


def slot_lookup_reference(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    epoch: torch.Tensor,
    maps: SlotMaps,
    fetch: FetchList,
    *,
    lag: int,
    page_size: int,
    block_size: int,
    locations: torch.Tensor | None = None,
    totals: torch.Tensor | None = None,
) -> None:
    """`slot_lookup` in plain torch; misses in order of request, then list."""
    per_page = page_size // block_size
    fetch.copies.zero_()
    for b, length in enumerate(seq_lens.tolist()):
        last_page = (length - 1) // page_size
        for h in range(block_lists.shape[1]):
            count = min(int(block_counts[b, h]), -(-length // block_size))
            if count <= 0:
                continue
            listed = block_lists[b, h, :count].long()
            closed = listed // per_page < last_page
            looked_up = listed[closed]
            blocks = page_table[b].long()[looked_up // per_page] * per_page + looked_up % per_page
            slots = maps.slot_map[h, blocks]
            hit = slots >= 0
            maps.slot_stamp[h, slots[hit].long()] = epoch - lag
            missed = blocks[slots == NO_SLOT]
            at = int(fetch.counts[h])
            fits = missed[: max(0, fetch.capacity - at)]
            fetch.blocks[h, at : at + len(fits)] = fits.int()
            maps.slot_map[h, fits] = CLAIMED
            fetch.counts[h] += len(missed)
            if locations is not None:
                found = torch.empty_like(listed, dtype=torch.int32)
                found[closed] = torch.where(hit, slots, -1 - blocks.int())
                found[~closed] = (OPEN - listed[~closed] % per_page).int()
                locations[b, h, :count] = found
            if totals is not None:
                totals[0] += hit.sum()
                totals[1] += len(missed)
