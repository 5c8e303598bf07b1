"""Gives the blocks that a lookup missed slots of a cache, by a clock over the slots that were not used lately."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_contiguous, check_dtype, check_shape
from ._dispatch import use_triton
from .slot_maps import NO_SLOT, FetchList, SlotMaps, check_epoch, check_totals

AGES = (64, 32, 16, 8, 4, 2, 1)
"""Steps since a slot's last use: it takes slots of the first of these ages of which there are enough."""

IDLE = AGES[0] - 1
"""The lag of what nobody has asked for: takes slots that were last used more steps ago, and is taken first."""

LAGS = (0, 1, IDLE)

_NO_SLOT: tl.constexpr = tl.constexpr(NO_SLOT)
_NUM_AGES: tl.constexpr = tl.constexpr(8)
_OLDEST: tl.constexpr = tl.constexpr(AGES[0])


@triton.jit
def _slot_assign_kernel(
    epoch,
    slot_map,
    slot_block,
    slot_stamp,
    hand,
    missed_blocks,
    missed_counts,
    source,
    target,
    copies,
    totals,
    source_pages,
    pool_blocks,
    slots,
    capacity,
    LAG: tl.constexpr,
    BLOCKS_PER_PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    h = tl.program_id(0).to(tl.int64)
    found = tl.load(missed_counts + h)
    if found > 0:
        tl.store(missed_counts + h, 0)
        misses = tl.minimum(found, capacity)
        now = tl.load(epoch)
        chunk = tl.arange(0, CHUNK)
        own_map = slot_map + h * pool_blocks
        own_block = slot_block + h * slots
        own_stamp = slot_stamp + h * slots
        own_missed = missed_blocks + h * capacity

        # Ages fall from the oldest by halves; the last few are 1, or 2 for a prefetch.
        ages = tl.maximum(_OLDEST >> tl.arange(0, _NUM_AGES), LAG + 1)
        enough = tl.zeros((_NUM_AGES,), tl.int32)
        for first in range(0, slots, CHUNK):
            slot = first + chunk
            age = now - tl.load(own_stamp + slot, mask=slot < slots, other=now)
            enough += tl.sum((age[None, :] >= ages[:, None]).to(tl.int32), 1)
        threshold = tl.max(tl.where(enough >= misses, ages, LAG + 1))

        start = tl.load(hand + h)
        given = tl.zeros((), tl.int32)
        moved = tl.zeros((), tl.int32)
        evicted = tl.zeros((), tl.int32)
        first = tl.zeros((), tl.int32)
        while (first < slots) & (given < misses):
            step = first + chunk
            slot = start + step
            slot = tl.where(slot >= slots, slot - slots, slot)
            inside = step < slots
            free = inside & (now - tl.load(own_stamp + slot, mask=inside, other=now) >= threshold)
            order = given + tl.cumsum(free.to(tl.int32), 0) - 1
            taken = free & (order < misses)
            before = tl.load(own_block + slot, mask=taken, other=_NO_SLOT)
            held = taken & (before >= 0)
            # A block whose page was written anew left the map by itself, and may be in another slot by now.
            valid = held & (tl.load(own_map + before, mask=held, other=_NO_SLOT) == slot)
            tl.store(own_map + before, tl.full((CHUNK,), _NO_SLOT, tl.int32), mask=valid)
            block = tl.load(own_missed + order, mask=taken, other=0)
            tl.store(own_map + block, slot, mask=taken)
            tl.store(own_block + slot, block, mask=taken)
            tl.store(own_stamp + slot, tl.zeros((CHUNK,), tl.int32) + (now - LAG), mask=taken)
            count = tl.sum(taken.to(tl.int32))
            at = tl.atomic_add(copies, count) + order - given
            page = block // BLOCKS_PER_PAGE
            if source_pages is not None:
                page = tl.load(source_pages + page, mask=taken, other=0)
            place = (page * tl.num_programs(0) + h) * BLOCKS_PER_PAGE + block % BLOCKS_PER_PAGE
            tl.store(source + at, place.to(tl.int32), mask=taken)
            tl.store(target + at, (h * slots + slot).to(tl.int32), mask=taken)
            moved = tl.maximum(moved, tl.max(tl.where(taken, step + 1, 0)))
            evicted += tl.sum(valid.to(tl.int32))
            given += count
            first += CHUNK
        if moved > 0:
            tl.store(hand + h, (start + moved) % slots)
        for first_left in range(given, misses, CHUNK):
            order = first_left + chunk
            block = tl.load(own_missed + order, mask=order < misses, other=0)
            tl.store(own_map + block, tl.full((CHUNK,), _NO_SLOT, tl.int32), mask=order < misses)
        if totals is not None:
            tl.atomic_add(totals + 2, (found - given).to(tl.int64))
            tl.atomic_add(totals + 3, evicted.to(tl.int64))


def slot_assign(
    epoch: torch.Tensor,
    maps: SlotMaps,
    fetch: FetchList,
    *,
    lag: int,
    blocks_per_page: int,
    totals: torch.Tensor | None = None,
    source_pages: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Gives each block of `fetch.blocks` a slot of its head, as far as there are slots that may be taken.

    A slot may be taken if its stamp is below `epoch - lag`: what this step reads stays where it is, and a prefetch
    (`lag` 1) also leaves alone what the last step read and what was prefetched for this one. A hand goes round a head's
    slots and takes those whose stamp lies at least an age back, the first of `AGES` of which there are enough. The
    block that was there leaves `slot_map`; the new one enters it, stamped `epoch - lag`, and its copy is put on the
    list. Blocks that get no slot leave the map as blocks that are in none.

    Args:
        epoch: `[1]` int32, number of the step; above 64 plus any stamp of slots that were never used.
        maps: the layer's maps.
        fetch: `blocks` and `counts` of the lookup; `counts` become 0, and `source`, `target` and `copies` get the
            copies, in any order.
        lag: as in the lookup.
        blocks_per_page: blocks of a page.
        totals: `[4]` int64, see `slot_maps.TOTALS`; missed blocks without a slot, and blocks put out, are added to.
        source_pages: `[P]` int32, contiguous: where each page of the pool lies in what is copied from; None for the
            pool itself.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    kv_heads = maps.slot_map.shape[0]
    check_epoch(epoch)
    maps.check(kv_heads, blocks_per_page)
    fetch.check(kv_heads)
    check_totals(totals)
    if lag not in LAGS:
        raise ValueError(f"lag is {lag}; allowed: {', '.join(map(str, LAGS))}")
    if source_pages is not None:
        check_shape("source_pages", source_pages, maps.slot_map.shape[1] // blocks_per_page)
        check_dtype("source_pages", source_pages, torch.int32)
        check_contiguous("source_pages", source_pages)
    run = _slot_assign_triton if use_triton(impl, maps.slot_map) else slot_assign_reference
    run(epoch, maps, fetch, lag=lag, blocks_per_page=blocks_per_page, totals=totals, source_pages=source_pages)


def _slot_assign_triton(
    epoch: torch.Tensor,
    maps: SlotMaps,
    fetch: FetchList,
    *,
    lag: int,
    blocks_per_page: int,
    totals: torch.Tensor | None,
    source_pages: torch.Tensor | None,
) -> None:
    _slot_assign_kernel[(maps.slot_map.shape[0],)](
        epoch,
        maps.slot_map,
        maps.slot_block,
        maps.slot_stamp,
        maps.hand,
        fetch.blocks,
        fetch.counts,
        fetch.source,
        fetch.target,
        fetch.copies,
        totals,
        source_pages,
        maps.slot_map.shape[1],
        maps.slots,
        fetch.capacity,
        LAG=lag,
        BLOCKS_PER_PAGE=blocks_per_page,
        CHUNK=min(1024, max(32, triton.next_power_of_2(maps.slots))),
        num_warps=4,
    )


def slot_assign_reference(
    epoch: torch.Tensor,
    maps: SlotMaps,
    fetch: FetchList,
    *,
    lag: int,
    blocks_per_page: int,
    totals: torch.Tensor | None = None,
    source_pages: torch.Tensor | None = None,
) -> None:
    """`slot_assign` in plain torch; copies in order of heads."""
    kv_heads, slots = maps.slot_block.shape
    now = int(epoch)
    for h, found in enumerate(fetch.counts.tolist()):
        misses = min(found, fetch.capacity)
        blocks = fetch.blocks[h, :misses].long()
        ring = (torch.arange(slots, device=blocks.device) + maps.hand[h]) % max(slots, 1)
        age = now - maps.slot_stamp[h, ring]
        ages = [max(age, lag + 1) for age in AGES]
        threshold = next((a for a in ages if int((age >= a).sum()) >= misses), lag + 1)
        steps = (age >= threshold).nonzero().flatten()[:misses]
        slot, left = ring[steps], blocks[len(steps) :]
        blocks = blocks[: len(steps)]
        before = maps.slot_block[h, slot].long()
        valid = (before >= 0) & (maps.slot_map[h, before.clamp_min(0)] == slot)
        maps.slot_map[h, before[valid]] = NO_SLOT
        maps.slot_map[h, left] = NO_SLOT
        maps.slot_map[h, blocks] = slot.int()
        maps.slot_block[h, slot] = blocks.int()
        maps.slot_stamp[h, slot] = now - lag
        if len(steps):
            maps.hand[h] = (maps.hand[h] + steps[-1] + 1) % slots
        at = int(fetch.copies)
        copies = slice(at, at + len(steps))
        page, inner = blocks // blocks_per_page, blocks % blocks_per_page
        page = page if source_pages is None else source_pages[page].long()
        fetch.source[copies] = ((page * kv_heads + h) * blocks_per_page + inner).int()
        fetch.target[copies] = (h * slots + slot).int()
        fetch.copies.add_(len(steps))
        if totals is not None:
            totals[2] += found - len(steps)
            totals[3] += valid.sum()
    fetch.counts.zero_()
