"""Combine of the parts that the attention grid leaves, all tiles of all blocks.

Bytes: the parts of shared rows and the output. The parts are in the L2 cache, as right after the attention kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import AttentionWorkspace
from sparse_kernels import _attention_plan as plan
from sparse_kernels.combine import combine, combine_reference

from .common import Measurement, Suite, check_close, time_in_turn


def parts_of_shared_rows(tiles: list[int], num_programs: int) -> int:
    """Parts that the attention kernel writes: programs of each row that more than one program works on."""
    total = sum(tiles)
    working = min(num_programs, total)
    parts = before = 0
    for n in tiles:
        if n:
            first, last = ((t * working - 1) // total for t in (before + 1, before + n))
            parts += last - first + 1 if last > first else 0
        before += n
    return parts


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size and context."""
    workspace = AttentionWorkspace.create(None, suite.group_size, suite.head_dim, suite.device)
    workspace.partial_out.normal_()
    workspace.partial_max.normal_()
    workspace.partial_sum.uniform_(1.0, 50.0)
    tile = plan.tile_config(suite.head_dim, suite.dtype).tile
    for size, context in suite.cases():
        batch = suite.batch(size, context)
        # Rows inside one program are not written, so the outputs must agree there from the start.
        out = torch.zeros_like(batch.q)
        expected = torch.zeros_like(batch.q)
        arguments = {"block_size": suite.block_size, "tile": tile}
        call = partial(combine, workspace, batch.seq_lens, None, **arguments, out=out)
        call()
        combine_reference(workspace, batch.seq_lens, None, **arguments, out=expected)
        check_close(f"combine B={size} context={context}", out, expected, 1e-2)
        tiles = plan.tiles_per_row(batch.seq_lens, None, suite.num_kv_heads, block_size=suite.block_size, tile=tile)
        parts = parts_of_shared_rows(tiles, workspace.num_programs)
        moved = parts * suite.group_size * (suite.head_dim + 2) * 4 + out.nbytes
        yield Measurement("combine", f"{parts} parts", size, context, None, time_in_turn([call]), moved)
