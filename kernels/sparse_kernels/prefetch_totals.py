"""Counts what was prefetched for a layer, and how much of it the layer went on to read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_contiguous, check_dtype, check_shape
from ._dispatch import use_triton
from .slot_maps import FetchList, SlotMaps, check_epoch

FIELDS = ("prefetched", "used")
"""What `totals` holds, in order."""


@triton.jit
def _prefetch_totals_kernel(
    source,
    target,
    copies,
    slot_block,
    slot_stamp,
    epoch,
    totals,
    KV_HEADS: tl.constexpr,
    PER_PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    count = tl.load(copies)
    now = tl.load(epoch)
    used = tl.zeros((), tl.int32)
    for start in range(0, count, CHUNK):
        index = start + tl.arange(0, CHUNK)
        valid = index < count
        place = tl.load(source + index, mask=valid, other=0)
        block = place // (KV_HEADS * PER_PAGE) * PER_PAGE + place % PER_PAGE
        slot = tl.load(target + index, mask=valid, other=0)
        stays = tl.load(slot_block + slot, mask=valid, other=-1) == block
        read = tl.load(slot_stamp + slot, mask=valid, other=0) == now
        used += tl.sum((valid & stays & read).to(tl.int32), 0)
    tl.store(totals, tl.load(totals) + count)
    tl.store(totals + 1, tl.load(totals + 1) + used)


def prefetch_totals(
    fetch: FetchList,
    maps: SlotMaps,
    epoch: torch.Tensor,
    *,
    blocks_per_page: int,
    totals: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Adds the copies of `fetch`, and those of them whose block has been read in this epoch, to `totals`.

    To be called once a layer has fetched what it misses: what it reads has this epoch's stamp then, and a block that
    was put out meanwhile is not in its slot any more.

    Args:
        fetch: what a `slot_assign` for a forecast has left.
        maps: the layer's.
        epoch: `[1]` int32.
        blocks_per_page: of the pool.
        totals: `[2]` int64 in the order of `FIELDS`.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    kv_heads = maps.slot_block.shape[0]
    maps.check(kv_heads, blocks_per_page)
    fetch.check(kv_heads)
    check_epoch(epoch)
    check_shape("totals", totals, len(FIELDS))
    check_dtype("totals", totals, torch.int64)
    check_contiguous("totals", totals)
    if not maps.slots:
        return
    if not use_triton(impl, totals):
        return prefetch_totals_reference(fetch, maps, epoch, blocks_per_page=blocks_per_page, totals=totals)
    _prefetch_totals_kernel[(1,)](
        fetch.source,
        fetch.target,
        fetch.copies,
        maps.slot_block,
        maps.slot_stamp,
        epoch,
        totals,
        KV_HEADS=kv_heads,
        PER_PAGE=blocks_per_page,
        CHUNK=1024,
        num_warps=4,
    )


def prefetch_totals_reference(
    fetch: FetchList, maps: SlotMaps, epoch: torch.Tensor, *, blocks_per_page: int, totals: torch.Tensor
) -> None:
    """`prefetch_totals` in plain torch."""
    kv_heads = maps.slot_block.shape[0]
    valid = torch.arange(len(fetch.target), device=fetch.target.device) < fetch.copies
    target = torch.where(valid, fetch.target, 0).long()
    source = torch.where(valid, fetch.source, 0)
    block = source // (kv_heads * blocks_per_page) * blocks_per_page + source % blocks_per_page
    stays = maps.slot_block.flatten()[target] == block
    used = valid & stays & (maps.slot_stamp.flatten()[target] == epoch)
    totals += torch.stack([fetch.copies[0].long(), used.sum()])
