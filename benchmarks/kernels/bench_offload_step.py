"""One layer's fetch and attention under offload, in steps that change part of their lists, beside the resident layer.

The case tells the missed share and the time as a multiple of its bound, the resident attention's time plus the missed
bytes at 50 GB/s. Bytes: those of the resident attention, and the missed ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import AttentionWorkspace, slot_attention, sparse_attention_reference

from .bench_sparse_attention import attention_call, bytes_to_move
from .common import Batch, Measurement, Suite, check_close, time_in_turn
from .slots import Lists, SlotLayer, changed, fits

CHANGED = (0.02, 0.1, 0.25)
"""Share of a list's blocks that the next step replaces."""

SLOTS = 1.1
"""Slots ÷ blocks that a step reads: little more, so that what a step replaces is missed when it comes back."""

STEPS = 12
"""Steps that the graph goes through again and again: their lists together hold more blocks than there are slots."""

PCIE_RATE = 50e9


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size, context and share of kept blocks."""
    workspace = AttentionWorkspace.create(None, suite.group_size, suite.head_dim, suite.device)
    block_bytes = 2 * suite.block_size * suite.head_bytes
    for size, context in suite.cases():
        if not fits(suite, "offload_step"):
            return
        batch = suite.batch(size, context)
        for kept in suite.kept:
            first = suite.random_lists(batch, kept)
            out = torch.empty_like(batch.q)
            moved = bytes_to_move(suite, batch, first)
            share = moved / bytes_to_move(suite, batch, (None, None))
            resident = time_in_turn([attention_call(suite, batch, first, workspace, out)])
            yield Measurement("offload_step", f"resident, kept {kept}", size, context, share, resident, moved)
            for part in CHANGED:
                lists = [first]
                for seed in range(STEPS - 1):
                    lists.append(changed(suite, batch, lists[-1], part, seed))
                layer = SlotLayer.create(suite, batch, int(SLOTS * int(first[1].sum(0).max())))
                steps = [partial(_step, layer, batch, each, out, workspace) for each in lists]
                for step in steps:
                    step()
                missed = 0
                for step in steps:
                    step()
                    missed += int(layer.fetch.copies)
                _check(suite, batch, lists[-1], out)
                missed_bytes = missed / STEPS * block_bytes
                seconds = time_in_turn(steps)
                bound = resident + missed_bytes / PCIE_RATE
                listed = sum(int(each[1].sum()) for each in lists)
                case = f"{missed / listed:.1%} missed, {seconds / bound:.2f} of bound, kept {kept}"
                yield Measurement("offload_step", case, size, context, share, seconds, moved + int(missed_bytes))


def _step(layer: SlotLayer, batch: Batch, lists: Lists, out: torch.Tensor, workspace: AttentionWorkspace) -> None:
    layer.step(batch, lists)
    slot_attention(
        batch.q,
        layer.sources,
        layer.locations,
        batch.page_table,
        batch.seq_lens,
        *lists,
        scale=layer.suite.scale,
        page_size=layer.suite.page_size,
        block_size=layer.suite.block_size,
        out=out,
        workspace=workspace,
    )


def _check(suite: Suite, batch: Batch, lists: Lists, out: torch.Tensor) -> None:
    """Compares the first request with the reference over the pool."""
    expected = torch.empty_like(batch.q[:1])
    one = batch.request(0)
    sparse_attention_reference(
        one.q,
        suite.k_pool,
        suite.v_pool,
        one.page_table,
        one.seq_lens,
        *(each[:1] for each in lists),
        scale=suite.scale,
        page_size=suite.page_size,
        block_size=suite.block_size,
        out=expected,
    )
    check_close("offload_step, request 0", out[:1], expected, 1e-2)
