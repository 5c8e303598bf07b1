"""What became of prefetched blocks: kernel = brute force, with blocks put out and never read; the rest is poison."""

from __future__ import annotations

import random

import pytest
import torch
from factories import DEVICE
from sparse_kernels import FetchList, SlotMaps, prefetch_totals

EPOCH, HEADS, PER_PAGE, SLOTS, PAGES = 9, 3, 4, 40, 30


def cache(capacity: int = 700) -> tuple[FetchList, SlotMaps]:
    fetch = FetchList.create(HEADS, capacity, DEVICE)
    fetch.source.fill_(2**30)
    fetch.target.fill_(2**30)
    return fetch, SlotMaps.create(HEADS, PAGES * PER_PAGE, SLOTS, DEVICE)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("copies", [0, 1, 17, 100, 1500])
def test_counts_what_stayed_and_was_read(impl: str, copies: int) -> None:
    draw = random.Random(copies)
    fetch, maps = cache()
    for h in range(HEADS):
        for s in range(SLOTS):
            maps.slot_block[h, s] = draw.randrange(PAGES * PER_PAGE)
            maps.slot_stamp[h, s] = draw.choice((EPOCH, EPOCH - 1, 0))
    used = 0
    for place in range(copies):
        h, s = draw.randrange(HEADS), draw.randrange(SLOTS)
        stays = draw.random() < 0.6
        block = int(maps.slot_block[h, s]) if stays else draw.randrange(PAGES * PER_PAGE)
        fetch.target[place] = h * SLOTS + s
        fetch.source[place] = (block // PER_PAGE * HEADS + h) * PER_PAGE + block % PER_PAGE
        used += block == int(maps.slot_block[h, s]) and int(maps.slot_stamp[h, s]) == EPOCH
    fetch.copies.fill_(copies)
    totals = torch.tensor([5, 10**10], device=DEVICE)
    epoch = torch.tensor([EPOCH], dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        prefetch_totals(fetch, maps, epoch, blocks_per_page=PER_PAGE, totals=totals, impl=impl)
    assert totals.tolist() == [5 + 2 * copies, 10**10 + 2 * used]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_layer_without_slots_has_fetched_nothing(impl: str) -> None:
    fetch, _ = cache()
    fetch.copies.fill_(3)
    maps = SlotMaps.create(HEADS, PAGES * PER_PAGE, 0, DEVICE)
    totals = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    epoch = torch.ones(1, dtype=torch.int32, device=DEVICE)
    prefetch_totals(fetch, maps, epoch, blocks_per_page=PER_PAGE, totals=totals, impl=impl)
    assert totals.tolist() == [0, 0]


def test_refuses_other_totals() -> None:
    fetch, maps = cache()
    epoch = torch.ones(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"totals has shape .*; needed: \[2\]"):
        prefetch_totals(fetch, maps, epoch, blocks_per_page=PER_PAGE, totals=torch.zeros(3, dtype=torch.int64))
