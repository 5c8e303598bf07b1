"""Claim and assign of a prompt's blocks by prefill: all missing and no slot idle, then all in slots.

Bytes: those of the list and the map, and the stamps of all slots once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import FetchList, SlotMaps, slot_assign, slot_claim
from sparse_kernels.slot_assign import IDLE

from .common import Measurement, Suite, time_in_turn


def _install(blocks: torch.Tensor, epoch: torch.Tensor, maps: SlotMaps, fetch: FetchList, per_page: int) -> None:
    slot_claim(blocks, epoch, maps, fetch, lag=IDLE)
    slot_assign(epoch, maps, fetch, lag=IDLE, blocks_per_page=per_page)


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every context, at batch 1."""
    for context in suite.contexts:
        blocks = torch.arange(context // suite.page_size * suite.blocks_per_page, dtype=torch.int32).to(suite.device)
        number = len(blocks)
        maps = SlotMaps.create(suite.num_kv_heads, number, number, suite.device)
        fetch = FetchList.create(suite.num_kv_heads, number, suite.device)
        epoch = torch.full((1,), 100, dtype=torch.int32, device=suite.device)
        install = partial(_install, blocks, epoch, maps, fetch, suite.blocks_per_page)
        for case, stamp, copies in (("no idle slot", 100, 0), ("all in slots", 0, number * suite.num_kv_heads)):
            maps.slot_stamp.fill_(stamp)
            install()
            if int(fetch.copies) != copies:
                raise RuntimeError(f"slot_claim of {number} blocks, {case}: {int(fetch.copies)} copies")
            moved = suite.num_kv_heads * number * 3 * 4
            seconds = time_in_turn([install])
            yield Measurement("slot_claim", f"with assign, {case}", 1, context, None, seconds, moved)
