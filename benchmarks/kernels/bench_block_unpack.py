"""Float8 blocks from a pinned pool of 2 GiB, in random order, decoded, by grids of several sizes. Bytes: what is read.

`of read rate` is against the GPU's own memory; the limit here is PCIe.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import block_unpack, unpack_blocks
from sparse_kernels.host_block import packed_bytes

from .common import Measurement, Suite, time_in_turn
from .slots import pinned

POOL_BYTES = 2 * 2**30
COUNTS = (64, 256, 1024, 8192, 32768)
PROGRAMS = (8, 16, 32, 64)


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures counts of blocks and grids; the suite only says what a block is."""
    size = packed_bytes(suite.block_size, suite.head_dim)
    total = POOL_BYTES // size
    source = pinned(torch.randint(0, 0x7F, (total, size), dtype=torch.uint8))
    source[:, -2 * suite.block_size :] = 127
    shape = (max(COUNTS), 2, suite.block_size, suite.head_dim)
    target = torch.zeros(shape, dtype=suite.dtype, device=suite.device)
    come_from = torch.randperm(total, device=suite.device, dtype=torch.int32)
    go_to = torch.randperm(max(COUNTS), device=suite.device, dtype=torch.int32)
    n = torch.zeros(1, dtype=torch.int32, device=suite.device)
    for count in COUNTS:
        n.fill_(count)
        # Parts of the pool in turn.
        parts = [come_from[at : at + max(COUNTS)] for at in range(0, total - max(COUNTS) + 1, max(COUNTS))][:8]
        expected = unpack_blocks(source[parts[0][:64].long().cpu()], suite.block_size, suite.dtype)[:count]
        for programs in PROGRAMS:
            calls = [partial(block_unpack, source, target, part, go_to, n, programs=programs) for part in parts]
            target.zero_()
            calls[0]()
            if not torch.equal(target[go_to[: len(expected)].long()].cpu(), expected):
                raise RuntimeError(f"block_unpack of {count} blocks by {programs} programs copied something else")
            seconds = time_in_turn(calls)
            yield Measurement(
                "block_unpack", f"{count} blocks of {size} B, {programs} programs", 1, 0, None, seconds, count * size
            )
