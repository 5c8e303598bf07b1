"""Block scores from means of windows, one vector a KV head and blocks of 64, as preset `sparda` has them.

Bytes: the means, and the scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import block_score_strided, block_score_strided_reference, block_statistics
from sparse_kernels.block_score_strided import STRIDE

from .block_mass import mass_arguments
from .common import Measurement, Suite, check_close, time_in_turn


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size and context."""
    suite = dataclasses.replace(suite, group_size=1, block_size=64)
    pages = torch.arange(suite.num_pages, device=suite.device, dtype=torch.int32)
    shape = (suite.num_pages, suite.num_kv_heads, suite.page_size // STRIDE, 1, suite.head_dim)
    means = torch.empty(shape, dtype=suite.dtype, device=suite.device)
    block_statistics(suite.k_pool, pages, kind="mean", page_size=suite.page_size, block_size=STRIDE, out=means)
    arguments = mass_arguments(suite)
    for size, context in suite.cases():
        read = size * (context // suite.page_size) * suite.num_kv_heads * means[0, 0].nbytes
        sets = suite.input_sets(size, context, read)
        outs = [torch.zeros((size, suite.num_kv_heads, 1, suite.capacity(context)), device=suite.device) for _ in sets]
        calls = [
            partial(block_score_strided, each.q, means, each.page_table, each.seq_lens, **arguments, out=out)
            for each, out in zip(sets, outs, strict=True)
        ]
        calls[0]()
        for b in {0, size - 1}:
            one, expected = sets[0].request(b), torch.zeros_like(outs[0][b : b + 1])
            block_score_strided_reference(one.q, means, one.page_table, one.seq_lens, **arguments, out=expected)
            closed = int(one.seq_lens[0]) // suite.block_size
            found = outs[0][b, ..., :closed]
            check_close(f"B={size} context={context} request {b}", found, expected[0, ..., :closed], 1e-2)
        moved = read + outs[0][..., : suite.blocks(context)].nbytes
        yield Measurement("block_score_strided", "", size, context, None, time_in_turn(calls), moved)
