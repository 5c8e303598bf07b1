"""Maps and lists of the cache: what an empty one says, and that none is taken whose tensors do not fit together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from factories import DEVICE
from sparse_kernels import slot_maps
from sparse_kernels.slot_maps import MAX_POOL_BLOCKS, NO_SLOT, FetchList, SlotMaps

HEADS, BLOCKS, SLOTS, CAPACITY, BLOCKS_PER_PAGE = 2, 12, 5, 7, 4


def make(kind: type) -> Any:
    return kind.create(HEADS, *((BLOCKS, SLOTS) if kind is SlotMaps else (CAPACITY,)), DEVICE)


def check(made: Any) -> None:
    made.check(HEADS, *((BLOCKS_PER_PAGE,) if isinstance(made, SlotMaps) else ()))


FIELDS = [
    (kind, prefix, field.name)
    for kind, prefix in ((SlotMaps, "maps"), (FetchList, "fetch"))
    for field in dataclasses.fields(kind)
]


@pytest.mark.parametrize("slots", [0, SLOTS])
def test_an_empty_cache_holds_nothing(slots: int) -> None:
    maps = SlotMaps.create(HEADS, BLOCKS, slots, DEVICE)
    maps.check(HEADS, BLOCKS_PER_PAGE)
    assert maps.slots == slots
    assert maps.slot_map.tolist() == [[NO_SLOT] * BLOCKS] * HEADS
    assert maps.slot_block.tolist() == [[NO_SLOT] * slots] * HEADS
    assert maps.slot_stamp.tolist() == [[0] * slots] * HEADS
    assert maps.hand.tolist() == [0] * HEADS


@pytest.mark.parametrize("capacity", [0, CAPACITY])
def test_an_empty_list_fetches_nothing(capacity: int) -> None:
    fetch = FetchList.create(HEADS, capacity, DEVICE)
    fetch.check(HEADS)
    assert fetch.capacity == capacity
    assert fetch.counts.tolist() == [0] * HEADS
    assert fetch.copies.tolist() == [0]


CHANGES = [
    (*field, change)
    for field in FIELDS
    for change in ("longer", "int64", "strided")
    # One element is contiguous however it is cut out.
    if (field[-1], change) != ("copies", "strided")
]


@pytest.mark.parametrize(("kind", "prefix", "name", "change"), CHANGES)
def test_a_tensor_that_does_not_fit_is_refused_by_name(kind: type, prefix: str, name: str, change: str) -> None:
    made = make(kind)
    check(made)
    tensor = getattr(made, name)
    if change == "longer":
        other = torch.cat([tensor, tensor[:1]])
    elif change == "int64":
        other = tensor.long()
    else:
        other = torch.stack([tensor, tensor], -1)[..., 0]
    with pytest.raises(ValueError, match=rf"^{prefix}\.{name}\b"):
        check(dataclasses.replace(made, **{name: other}))


@pytest.mark.parametrize("blocks", [BLOCKS + 1, MAX_POOL_BLOCKS // BLOCKS_PER_PAGE * BLOCKS_PER_PAGE + BLOCKS_PER_PAGE])
def test_pools_of_torn_pages_or_too_many_blocks_are_refused(blocks: int) -> None:
    maps = SlotMaps.create(1, BLOCKS, SLOTS, "meta")
    maps.check(1, BLOCKS_PER_PAGE)
    with pytest.raises(ValueError, match=rf"^maps\.slot_map has {blocks} blocks; needed: a multiple of 4 up to"):
        dataclasses.replace(maps, slot_map=torch.empty(1, blocks, dtype=torch.int32, device="meta")).check(
            1, BLOCKS_PER_PAGE
        )


def test_epochs_and_totals_that_do_not_fit_are_refused() -> None:
    slot_maps.check_epoch(torch.zeros(1, dtype=torch.int32))
    slot_maps.check_totals(None)
    slot_maps.check_totals(torch.zeros(4, dtype=torch.int64))
    for epoch in (torch.zeros(2, dtype=torch.int32), torch.zeros(1)):
        with pytest.raises(ValueError, match=r"^epoch"):
            slot_maps.check_epoch(epoch)
    for totals in (torch.zeros(3, dtype=torch.int64), torch.zeros(4), torch.zeros(8, dtype=torch.int64)[::2]):
        with pytest.raises(ValueError, match=r"^totals"):
            slot_maps.check_totals(totals)
