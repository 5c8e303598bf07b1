"""Lookup of listed blocks in slots, all of them hits. Bytes: lists, slots of blocks, stamps, locations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from .common import Measurement, Suite, time_in_turn
from .slots import SlotLayer, fits


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size, context and share of kept blocks."""
    for size, context in suite.cases():
        if not fits(suite, "slot_lookup"):
            return
        batch = suite.batch(size, context)
        for kept in suite.kept:
            lists = suite.random_lists(batch, kept)
            layer = SlotLayer.create(suite, batch, int(lists[1].sum(0).max()))
            layer.step(batch, lists)
            if int(layer.fetch.copies) == 0:
                raise RuntimeError(f"slot_lookup B={size} context={context} kept={kept}: nothing was missed at first")
            layer.epoch.add_(1)
            layer.look_up(batch, lists)
            if int(layer.fetch.counts.sum()):
                raise RuntimeError(f"slot_lookup B={size} context={context} kept={kept}: blocks are missed again")
            listed = int(lists[1].sum())
            share = listed / (size * suite.num_kv_heads * -(-context // suite.block_size))
            seconds = time_in_turn([partial(layer.look_up, batch, lists)])
            yield Measurement("slot_lookup", f"all hits, kept {kept}", size, context, share, seconds, listed * 20)
