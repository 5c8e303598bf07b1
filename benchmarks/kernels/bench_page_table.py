"""Snapshot of the page table. Bytes: a 32-byte sector of the request table for each page, and the page table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import snapshot_page_table, snapshot_page_table_reference

from .common import Measurement, Suite, time_in_turn

SECTOR = 32


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size and context."""
    for size, context in suite.cases():
        columns = suite.capacity(context) // suite.blocks_per_page
        moved = size * (-(-context // suite.page_size)) * (SECTOR + 4)
        sets = suite.input_sets(size, context, moved)
        offsets = torch.arange(suite.page_size, dtype=torch.int32, device=suite.device)
        rows = torch.arange(size, device=suite.device).flip(0)
        calls, outputs = [], []
        for batch in sets:
            slots = (batch.page_table[:, :, None] * suite.page_size + offsets).flatten(1)
            names = ("page_table", "seq_lens_out", "closing_pages")
            shapes = ((size, columns), (size,), (size,))
            result = {
                name: torch.zeros(shape, dtype=torch.int32, device=suite.device)
                for name, shape in zip(names, shapes, strict=True)
            }
            arguments = (slots, rows, batch.seq_lens)
            calls.append(partial(snapshot_page_table, *arguments, page_size=suite.page_size, **result))
            outputs.append((arguments, result))
        calls[0]()
        arguments, result = outputs[0]
        expected = {name: torch.zeros_like(tensor) for name, tensor in result.items()}
        snapshot_page_table_reference(*arguments, page_size=suite.page_size, **expected)
        for name, tensor in result.items():
            if not torch.equal(tensor, expected[name]):
                raise RuntimeError(f"page_table B={size} context={context}: {name} differs from the reference")
        yield Measurement("snapshot_page_table", "", size, context, None, time_in_turn(calls), moved)
