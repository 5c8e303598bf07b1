"""What a forecast prefetches, from its masses: random ones, half of the blocks in slots, a budget of 8 MiB.

Bytes: the masses, the slots of all blocks once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import ExpectedWorkspace, expected_blocks, expected_blocks_reference

from .common import Measurement, Suite, time_in_turn

BUDGET_BYTES = 8 << 20


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size and context, with a vector for each query head and with one for each KV head."""
    rng = torch.Generator(suite.device).manual_seed(5)
    pool = suite.num_pages * suite.blocks_per_page
    draws = torch.rand((suite.num_kv_heads, pool), generator=rng, device=suite.device)
    slot_map = torch.where(draws < 0.5, -1, 0).int()
    budget = BUDGET_BYTES // (2 * suite.block_size * suite.head_bytes)
    sizes = {"page_size": suite.page_size, "block_size": suite.block_size, "min_context": 0, "budget": budget}
    for vectors in (suite.group_size, 1):
        for size, context in suite.cases():
            blocks = suite.capacity(context)
            shape = (size, suite.num_kv_heads, blocks)
            read = size * suite.num_kv_heads * blocks * (vectors + 1) * 4
            calls, results = [], []
            for batch in suite.input_sets(size, context, read):
                mass_shape = (size, suite.num_kv_heads, vectors, blocks)
                mass = torch.randn(mass_shape, generator=rng, device=suite.device) * 3
                inputs = (mass, batch.page_table, batch.seq_lens, slot_map)
                outputs = {
                    "workspace": ExpectedWorkspace.create(*shape, suite.device),
                    "block_lists": torch.zeros(shape, dtype=torch.int32, device=suite.device),
                    "block_counts": torch.zeros(shape[:2], dtype=torch.int32, device=suite.device),
                }
                calls.append(partial(expected_blocks, *inputs, **sizes, **outputs))
                results.append((inputs, outputs))
            calls[0]()
            inputs, outputs = results[0]
            counts = torch.zeros_like(outputs["block_counts"])
            expected_blocks_reference(*inputs, **sizes, **{**outputs, "block_counts": counts})
            if counts.sum() != outputs["block_counts"].sum():
                raise RuntimeError(f"expected_blocks B={size} context={context}: {int(counts.sum())} blocks expected")
            seconds = time_in_turn(calls)
            yield Measurement("expected_blocks", f"{vectors} a head", size, context, None, seconds, read)
