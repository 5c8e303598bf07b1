"""Totals over a decode step's requests, added on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._dispatch import use_triton

FIELDS = ("steps", "requests", "tokens", "blocks", "closed_tokens", "open_tokens", "scanned_steps")
"""What `totals` holds, in order. The last three count only requests that are scanned."""


@triton.jit
def _step_totals_kernel(
    seq_lens, totals, batch, min_context, PAGE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr
):
    requests = tl.zeros((), tl.int64)
    tokens = tl.zeros((), tl.int64)
    blocks = tl.zeros((), tl.int64)
    closed = tl.zeros((), tl.int64)
    scanned = tl.zeros((), tl.int64)
    for start in range(0, batch, CHUNK):
        index = start + tl.arange(0, CHUNK)
        lengths = tl.load(seq_lens + index, mask=index < batch, other=0).to(tl.int64)
        is_scanned = (lengths >= min_context) & (lengths > 0)
        requests += tl.sum((lengths > 0).to(tl.int64))
        tokens += tl.sum(lengths)
        blocks += tl.sum((lengths + BLOCK_SIZE - 1) // BLOCK_SIZE)
        closed += tl.sum(tl.where(is_scanned, lengths // PAGE_SIZE * PAGE_SIZE, 0))
        scanned += tl.sum(tl.where(is_scanned, lengths, 0))
    tl.store(totals, tl.load(totals) + (requests > 0).to(tl.int64))
    tl.store(totals + 1, tl.load(totals + 1) + requests)
    tl.store(totals + 2, tl.load(totals + 2) + tokens)
    tl.store(totals + 3, tl.load(totals + 3) + blocks)
    tl.store(totals + 4, tl.load(totals + 4) + closed)
    tl.store(totals + 5, tl.load(totals + 5) + scanned - closed)
    tl.store(totals + 6, tl.load(totals + 6) + (scanned > 0).to(tl.int64))


def step_totals(
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    block_size: int,
    min_context: int,
    totals: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Adds one decode step to `totals`.

    Args:
        seq_lens: `[B]` int32, tokens of each request; 0 marks a padded row.
        min_context: requests with fewer tokens are not scanned.
        totals: `[7]` int64 in the order of `FIELDS`. A step of padded rows alone does not count.

    Raises:
        ValueError: if `totals` has another shape or type.
    """
    if totals.shape != (len(FIELDS),) or totals.dtype != torch.int64:
        raise ValueError(f"totals is {totals.dtype} {tuple(totals.shape)}: give int64 [{len(FIELDS)}]")
    if not use_triton(impl, seq_lens):
        return step_totals_reference(
            seq_lens, page_size=page_size, block_size=block_size, min_context=min_context, totals=totals
        )
    _step_totals_kernel[(1,)](
        seq_lens, totals, len(seq_lens), min_context, PAGE_SIZE=page_size, BLOCK_SIZE=block_size, CHUNK=1024
    )


def step_totals_reference(
    seq_lens: torch.Tensor, *, page_size: int, block_size: int, min_context: int, totals: torch.Tensor
) -> None:
    """`step_totals` in plain torch."""
    lengths = seq_lens.long()
    scanned = torch.where(lengths >= min_context, lengths, 0)
    closed = scanned // page_size * page_size
    totals += torch.stack(
        [
            (lengths > 0).any().long(),
            (lengths > 0).sum(),
            lengths.sum(),
            ((lengths + block_size - 1) // block_size).sum(),
            closed.sum(),
            (scanned - closed).sum(),
            (scanned > 0).any().long(),
        ]
    )
