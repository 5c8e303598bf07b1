"""Lookup and assign of steps that change a fifth of their lists, with a quarter more slots than they read.

Bytes: those of the lookup, and the stamps of all slots twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from .common import Batch, Measurement, Suite, time_in_turn
from .slots import Lists, SlotLayer, changed, fits

CHANGED, SLOTS = 0.2, 1.25


def _step(layer: SlotLayer, batch: Batch, lists: Lists) -> None:
    layer.epoch.add_(1)
    layer.look_up(batch, lists)
    layer.assign()


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size, context and share of kept blocks."""
    for size, context in suite.cases():
        if not fits(suite, "slot_assign"):
            return
        batch = suite.batch(size, context)
        for kept in suite.kept:
            lists = [suite.random_lists(batch, kept)]
            for seed in range(7):
                lists.append(changed(suite, batch, lists[-1], CHANGED, seed))
            layer = SlotLayer.create(suite, batch, int(SLOTS * int(lists[0][1].sum(0).max())))
            seconds = time_in_turn([partial(_step, layer, batch, each) for each in lists])
            if int(layer.fetch.counts.sum()):
                raise RuntimeError(f"slot_assign B={size} context={context} kept={kept}: claims are left")
            listed = sum(int(each[1].sum()) for each in lists) // len(lists)
            share = listed / (size * suite.num_kv_heads * -(-context // suite.block_size))
            moved = listed * 20 + 2 * layer.maps.slot_stamp.nbytes
            case = f"with lookup, {int(layer.fetch.copies) / listed:.0%} missed, kept {kept}"
            yield Measurement("slot_assign", case, size, context, share, seconds, moved)
