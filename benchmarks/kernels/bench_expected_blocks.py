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


EDGE_SHARE = 0.01
"""Of the chosen blocks: how many may be others, for rounding moves shares from bin to bin."""


def _chosen(block_lists: torch.Tensor, block_counts: torch.Tensor, **_: object) -> torch.Tensor:
    """`[B, Hkv, N]` bool."""
    places = torch.arange(block_lists.shape[2], device=block_lists.device)
    listed = places < block_counts[:, :, None]
    # What lies behind a list's end goes into a column of its own.
    target = torch.where(listed, block_lists, block_lists.shape[2]).long()
    mask = torch.zeros((*block_lists.shape[:2], block_lists.shape[2] + 1), dtype=torch.bool, device=places.device)
    return mask.scatter_(2, target, True)[:, :, :-1]


def _check(case: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    others = int((found & ~expected).sum())
    if found.sum() != expected.sum() or others > EDGE_SHARE * expected.sum():
        raise RuntimeError(
            f"expected_blocks {case}: {int(found.sum())} blocks, {others} of them others than the reference's "
            f"{int(expected.sum())}"
        )


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size and context, with a vector for each query head and with one for each KV head."""
    rng = torch.Generator(suite.device).manual_seed(5)
    pool = suite.num_pages * suite.blocks_per_page
    draws = torch.rand((suite.num_kv_heads, pool), generator=rng, device=suite.device)
    slot_map = torch.where(draws < 0.5, -1, 0).int()
    blocks = BUDGET_BYTES // (2 * suite.block_size * suite.head_bytes)
    budget = torch.tensor([blocks], dtype=torch.int32, device=suite.device)
    sizes = {"page_size": suite.page_size, "block_size": suite.block_size, "min_context": 0, "budget": budget}
    for vectors in (suite.group_size, 1):
        for size, context in suite.cases():
            blocks = suite.capacity(context)
            shape = (size, suite.num_kv_heads, blocks)
            read = size * suite.num_kv_heads * suite.blocks(context) * (vectors + 1) * 4
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
            expected = {name: torch.zeros_like(outputs[name]) for name in ("block_lists", "block_counts")}
            expected_blocks_reference(*inputs, **sizes, **{**outputs, **expected})
            _check(f"B={size} context={context}", _chosen(**outputs), _chosen(**expected))
            seconds = time_in_turn(calls)
            yield Measurement("expected_blocks", f"{vectors} a head", size, context, None, seconds, read)
