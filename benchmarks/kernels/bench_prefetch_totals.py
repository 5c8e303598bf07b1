"""What became of a layer's prefetched blocks, 64 to 1,024 of them. Bytes: places, blocks and stamps, once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import FetchList, SlotMaps, prefetch_totals

from .common import Measurement, Suite, time_in_turn

COPIES = (64, 1024)


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures numbers of copies; batch and context make no difference."""
    heads, per_page, most = suite.num_kv_heads, suite.blocks_per_page, max(COPIES)
    maps = SlotMaps.create(heads, most * per_page, most, suite.device)
    fetch = FetchList.create(heads, most, suite.device)
    epoch = torch.ones(1, dtype=torch.int32, device=suite.device)
    # Block i is in slot i of head 0; every other one has been read.
    index = torch.arange(most, dtype=torch.int32, device=suite.device)
    maps.slot_block[0] = index
    maps.slot_stamp[0] = index % 2
    fetch.target[:most] = index
    fetch.source[:most] = index // per_page * heads * per_page + index % per_page
    for copies in COPIES:
        fetch.copies.fill_(copies)
        totals = torch.zeros(2, dtype=torch.int64, device=suite.device)
        call = partial(prefetch_totals, fetch, maps, epoch, blocks_per_page=per_page, totals=totals)
        call()
        if totals.tolist() != [copies, copies // 2]:
            raise RuntimeError(f"prefetch_totals of {copies}: {totals.tolist()}")
        yield Measurement("prefetch_totals", f"{copies} copies", 1, 0, None, time_in_turn([call]), copies * 16)
