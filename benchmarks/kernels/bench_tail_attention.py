"""Tail attention, its merge included, at the shares of kept blocks asked for.

Bytes: log masses, masks and mean values of all closed pages, and the output read and written.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import AttentionWorkspace, tail_attention, tail_attention_reference

from benchmarks.kept_fractions import is_number

from .common import Batch, Measurement, Suite, check_close, time_in_turn

CELL = 64
SPREAD = 2.2
"""Standard deviation of the random log masses and log-sum-exps."""


def make_inputs(
    suite: Suite, batch: Batch, kept: float | str, seed: int, means: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What `tail_attention` takes by position, for one input set."""
    capacity = batch.page_table.shape[1] * suite.blocks_per_page
    rng = torch.Generator(suite.device).manual_seed(seed)
    shape = (batch.size, suite.num_kv_heads, suite.group_size, capacity)
    log_mass = SPREAD * torch.randn(shape, generator=rng, device=suite.device)
    lists, counts = suite.random_lists(batch, kept, seed)
    mask = torch.zeros(batch.size, suite.num_kv_heads, capacity + 1, dtype=torch.uint8, device=suite.device)
    mask.scatter_(2, lists.long(), 1)
    lse = 8 + SPREAD * torch.randn(batch.q.shape[:2], generator=rng, device=suite.device)
    return log_mass, batch.seq_lens, counts, mask[:, :, :capacity].contiguous(), means, batch.page_table, lse


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size, context and share of kept blocks."""
    workspace = AttentionWorkspace.create(None, suite.group_size, suite.head_dim, suite.device)
    cells = suite.page_size // CELL
    shape = (suite.num_pages, suite.num_kv_heads, cells, suite.head_dim)
    means = torch.randn(shape, dtype=suite.dtype, device=suite.device)
    sizes = {"page_size": suite.page_size, "block_size": suite.block_size}
    block_bytes = 4 * suite.group_size + 1 + suite.head_bytes * suite.block_size // CELL
    for size, context in suite.cases():
        moved = suite.num_kv_heads * (size * context // suite.block_size) * block_bytes
        # With all blocks kept there is no tail.
        for kept in (kept for kept in suite.kept if not (is_number(kept) and float(kept) >= 1)):
            sets = suite.input_sets(size, context, moved)
            inputs = [make_inputs(suite, batch, kept, seed, means) for seed, batch in enumerate(sets)]
            outs = [batch.q.clone() for batch in sets]
            calls = [
                partial(tail_attention, *arguments, **sizes, out=out, workspace=workspace)
                for arguments, out in zip(inputs, outs, strict=True)
            ]
            calls[0]()
            for b in {0, size - 1}:
                one = slice(b, b + 1)
                log_mass, seq_lens, counts, mask, _, pages, lse = inputs[0]
                expected = sets[0].q[one].clone()
                reference = (log_mass[one], seq_lens[one], counts[one], mask[one], means, pages[one], lse[one])
                tail_attention_reference(*reference, **sizes, out=expected)
                check_close(f"tail_attention B={size} context={context}", outs[0][one], expected, 1e-2)
            share = int(inputs[0][2].sum()) * suite.block_size / (sets[0].tokens * suite.num_kv_heads)
            total = moved + 2 * sets[0].q.nbytes
            yield Measurement("tail_attention", f"lists, kept {kept}", size, context, share, time_in_turn(calls), total)
