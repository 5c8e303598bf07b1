"""Puts those of a list of pool blocks that are in no slot on each head's list of misses, in the list's order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_contiguous, check_dtype, check_shape
from ._dispatch import use_triton
from .slot_maps import CLAIMED, NO_SLOT, FetchList, SlotMaps, check_epoch

_NO_SLOT: tl.constexpr = tl.constexpr(NO_SLOT)
_CLAIMED: tl.constexpr = tl.constexpr(CLAIMED)

CHUNK = 1024


# Lists differ in length: one kernel serves them all.
@triton.jit(do_not_specialize=["number"])
def _slot_claim_kernel(
    blocks,
    epoch,
    slot_map,
    slot_stamp,
    missed_blocks,
    missed_counts,
    copies,
    number,
    pool_blocks,
    slots,
    capacity,
    LAG: tl.constexpr,
    CHUNK: tl.constexpr,
):
    h = tl.program_id(0).to(tl.int64)
    if h == 0:
        tl.store(copies, 0)
    oldest = tl.load(epoch) - LAG
    found = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    while first < number:
        index = first + tl.arange(0, CHUNK)
        inside = index < number
        block = tl.load(blocks + index, mask=inside, other=0)
        places = slot_map + h * pool_blocks + block
        slot = tl.load(places, mask=inside, other=_CLAIMED)
        stamps = slot_stamp + h * slots + slot
        idle = (slot >= 0) & (tl.load(stamps, mask=slot >= 0, other=oldest) < oldest)
        tl.store(stamps, tl.zeros((CHUNK,), tl.int32) + oldest, mask=idle)
        free = inside & (slot == _NO_SLOT)
        # A block that is listed twice is claimed once.
        claims = tl.full((CHUNK,), _CLAIMED, tl.int32)
        won = free & (tl.atomic_xchg(places, claims, mask=free) == _NO_SLOT)
        order = found + tl.cumsum(won.to(tl.int32), 0) - 1
        tl.store(missed_blocks + h * capacity + order, block, mask=won & (order < capacity))
        tl.store(places, tl.full((CHUNK,), _NO_SLOT, tl.int32), mask=won & (order >= capacity))
        found += tl.sum(won.to(tl.int32))
        first += CHUNK
    tl.store(missed_counts + h, tl.minimum(found, capacity))


def slot_claim(
    blocks: torch.Tensor, epoch: torch.Tensor, maps: SlotMaps, fetch: FetchList, *, lag: int, impl: str = "auto"
) -> None:
    """Claims the blocks that are in no slot, for a `slot_assign` of the same lag that follows, which spares the others.

    Args:
        blocks: `[n]` int32, pool blocks, the ones that matter most first; the same for every head.
        epoch: `[1]` int32, number of the step.
        maps: the layer's maps; claims are written, and stamps of listed blocks in slots are raised to `epoch - lag`.
        fetch: each head's `blocks` and `counts` get the claimed blocks in order, as many as there is room for, and
            `copies` becomes 0. `counts` must be 0 before.
        lag: as in `slot_assign`.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    check_shape("blocks", blocks, None)
    check_dtype("blocks", blocks, torch.int32)
    check_contiguous("blocks", blocks)
    kv_heads = maps.slot_map.shape[0]
    check_epoch(epoch)
    maps.check(kv_heads, 1)
    fetch.check(kv_heads)
    if not use_triton(impl, maps.slot_map):
        slot_claim_reference(blocks, epoch, maps, fetch, lag=lag)
        return
    _slot_claim_kernel[(kv_heads,)](
        blocks,
        epoch,
        maps.slot_map,
        maps.slot_stamp,
        fetch.blocks,
        fetch.counts,
        fetch.copies,
        len(blocks),
        maps.slot_map.shape[1],
        maps.slots,
        fetch.capacity,
        LAG=lag,
        CHUNK=CHUNK,
        num_warps=4,
    )


def slot_claim_reference(
    blocks: torch.Tensor, epoch: torch.Tensor, maps: SlotMaps, fetch: FetchList, *, lag: int
) -> None:
    """`slot_claim` in plain torch."""
    fetch.copies.zero_()
    unique = torch.tensor(list(dict.fromkeys(blocks.tolist())), dtype=torch.int64, device=blocks.device)
    for h, (own_map, own_blocks, count) in enumerate(zip(maps.slot_map, fetch.blocks, fetch.counts, strict=True)):
        held = own_map[unique][own_map[unique] >= 0].long()
        maps.slot_stamp[h, held] = maps.slot_stamp[h, held].clamp_min(int(epoch) - lag)
        missing = unique[own_map[unique] == NO_SLOT][: fetch.capacity]
        own_map[missing] = CLAIMED
        own_blocks[: len(missing)] = missing.int()
        count.fill_(len(missing))
