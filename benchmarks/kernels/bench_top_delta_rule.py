"""Selection rule top-delta: every block near the pseudo-maximum. Bytes: the block maxima and the lists."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import top_delta_rule, top_delta_rule_reference

from .common import Measurement, Suite, time_in_turn

KEPT_DELTAS = (2.0, 4.0)
"""Nats; maxima are normal with a deviation of 2, 4 below the pseudo-maximum."""


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size and context."""
    for delta in KEPT_DELTAS:
        for size, context in suite.cases():
            rows = (size, suite.num_kv_heads)
            shape = (*rows, suite.group_size, suite.capacity(context))
            read = 4 * torch.Size((*shape[:3], suite.blocks(context))).numel()
            sets = suite.input_sets(size, context, read)
            rng = torch.Generator(suite.device).manual_seed(size)
            maxima = [2 * torch.randn(shape, generator=rng, device=suite.device) for _ in sets]
            pseudo = torch.full(shape[:3], 4.0, device=suite.device)
            lists = torch.zeros(*rows, shape[3], dtype=torch.int32, device=suite.device)
            counts, expected_counts = (torch.zeros(rows, dtype=torch.int32, device=suite.device) for _ in range(2))
            arguments = {
                "delta": torch.full((size,), delta, device=suite.device),
                "page_size": suite.page_size,
                "block_size": suite.block_size,
                "sink_tokens": 16,
                "window_tokens": 128,
                "min_context": 0,
            }
            calls = [
                partial(
                    top_delta_rule,
                    maxima[i],
                    pseudo,
                    batch.seq_lens,
                    block_lists=lists,
                    block_counts=counts,
                    **arguments,
                )
                for i, batch in enumerate(sets)
            ]
            calls[0]()
            expected = torch.zeros_like(lists)
            top_delta_rule_reference(
                maxima[0], pseudo, sets[0].seq_lens, block_lists=expected, block_counts=expected_counts, **arguments
            )
            listed = torch.arange(shape[3], device=suite.device) < expected_counts[..., None]
            if not torch.equal(counts, expected_counts) or not torch.equal(lists[listed], expected[listed]):
                raise RuntimeError(f"top_delta_rule B={size} context={context}: lists differ from the reference")
            blocks = suite.num_kv_heads * int(((sets[0].seq_lens - 1) // suite.block_size + 1).sum())
            kept = int(counts.sum()) / blocks
            moved = read + 4 * int(counts.sum())
            case = f"delta {delta:g}"
            yield Measurement("top_delta_rule", case, size, context, kept, time_in_turn(calls), moved)
