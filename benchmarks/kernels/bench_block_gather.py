"""Blocks from a pinned pool of 4 GiB, in random order, by grids of several sizes. Bytes: the blocks, once.

`of read rate` is against the GPU's own memory; the limit here is PCIe.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import block_gather

from .common import Measurement, Suite, time_in_turn
from .slots import pinned

POOL_BYTES = 4 * 2**30
COUNTS = (64, 256, 1024, 8192, 32768)
PROGRAMS = (8, 16, 32)


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures counts of blocks and grids; the suite only says what a block is."""
    shape = (2, suite.block_size, suite.head_dim)
    size = 2 * suite.block_size * suite.head_bytes
    total = POOL_BYTES // size
    source = pinned(torch.zeros((total, *shape), dtype=suite.dtype))
    source.view(torch.int32).view(total, -1)[:] = torch.arange(total, dtype=torch.int32)[:, None]
    target = torch.zeros((max(COUNTS), *shape), dtype=suite.dtype, device=suite.device)
    come_from = torch.randperm(total, device=suite.device, dtype=torch.int32)
    go_to = torch.randperm(max(COUNTS), device=suite.device, dtype=torch.int32)
    n = torch.zeros(1, dtype=torch.int32, device=suite.device)
    for count in COUNTS:
        n.fill_(count)
        # Parts of the pool in turn.
        parts = [come_from[at : at + max(COUNTS)] for at in range(0, total - max(COUNTS) + 1, max(COUNTS))][:8]
        for programs in PROGRAMS:
            calls = [partial(block_gather, source, target, part, go_to, n, programs=programs) for part in parts]
            target.zero_()
            calls[0]()
            copied = target.view(torch.int32).view(max(COUNTS), -1)[go_to[:count].long()]
            if not (copied == parts[0][:count, None]).all():
                raise RuntimeError(f"block_gather of {count} blocks by {programs} programs copied something else")
            seconds = time_in_turn(calls)
            yield Measurement(
                "block_gather", f"{count} blocks of {size} B, {programs} programs", 1, 0, None, seconds, count * size
            )
