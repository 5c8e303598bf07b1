"""Merges the parts of rows that several programs of `fused_top_delta` shared, and writes the zeros of empty rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _fused_plan as plan
from . import _score_tile as score_tile
from ._fused_plan import FusedWorkspace
from .combine import CHANNELS, PARTS, add_parts


@triton.jit(do_not_specialize=["batch", "shares"])
def _fused_combine_kernel(
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    partial_counts,
    seq_lens,
    out_ptr,
    block_counts,
    kept_total,
    last_kept,
    spans,
    lse_ptr,
    out_stride_b,
    out_stride_h,
    counts_stride_b,
    counts_stride_h,
    batch,
    shares,
    kv_heads,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    REQUESTS: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0)
    g = tl.program_id(1) % G
    channels = (tl.program_id(1) // G) * CHANNELS + tl.arange(0, CHANNELS)
    if last_kept is None:
        units, first, last = plan.row_parts(row, batch, kv_heads, shares, seq_lens, PAGE, REQUESTS)
    else:
        units = tl.load(seq_lens + row // kv_heads)
        first = tl.load(spans + 2 * row)
        last = tl.load(spans + 2 * row + 1)
    shared = (units > 0) & (first < last)
    # Rows inside one program are complete already.
    if shared | (units == 0):
        stop = tl.where(shared, last + 1, first)
        highest, weight_sum, acc = add_parts(
            tl.full((), float("-inf"), tl.float32),
            tl.zeros((), tl.float32),
            tl.zeros((CHANNELS,), tl.float32),
            first,
            stop,
            g,
            channels,
            partial_out_ptr,
            partial_max_ptr,
            partial_sum_ptr,
            G,
            D,
            PARTS,
        )
        result = acc / tl.where(weight_sum > 0, weight_sum, 1.0)
        b = (row // kv_heads).to(tl.int64)
        h = row % kv_heads
        target = out_ptr + b * out_stride_b + (h * G + g) * out_stride_h + channels
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=channels < D)
        if tl.program_id(1) < G:
            if lse_ptr is not None:
                lse = (highest + tl.log2(weight_sum)) * score_tile.LN_2
                tl.store(lse_ptr + (b * kv_heads + h) * G + g, lse)
            if g == 0:
                kept = tl.zeros((), tl.int32)
                for start in range(first, stop, PARTS):
                    programs = start + tl.arange(0, PARTS)
                    slots = 2 * programs + (programs == first).to(tl.int32)
                    kept += tl.sum(tl.load(partial_counts + slots, mask=programs < stop, other=0))
                tl.store(block_counts + b * counts_stride_b + h * counts_stride_h, kept)
                if kept_total is not None:
                    tl.atomic_add(kept_total + h, kept.to(tl.int64), sem="relaxed")
                if last_kept is not None:
                    tl.store(last_kept + row, kept)
    else:
        if last_kept is not None:  # noqa: SIM102 - a condition of the compiler's
            if tl.program_id(1) == 0:
                counts = block_counts + row // kv_heads * counts_stride_b + row % kv_heads * counts_stride_h
                tl.store(last_kept + row, tl.load(counts))


def combine_parts(
    workspace: FusedWorkspace,
    seq_lens: torch.Tensor,
    page_size: int,
    out: torch.Tensor,
    block_counts: torch.Tensor,
    kept_total: torch.Tensor | None,
    last_kept: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Completes the outputs of `fused_top_delta`, which has checked all arguments."""
    batch, heads, head_dim = out.shape
    kv_heads = block_counts.shape[1]
    group_size = heads // kv_heads
    channels = min(CHANNELS, triton.next_power_of_2(head_dim))
    parts = workspace.parts
    _fused_combine_kernel[(batch * kv_heads, group_size * triton.cdiv(head_dim, channels))](
        parts.partial_out,
        parts.partial_max,
        parts.partial_sum,
        workspace.counts,
        seq_lens,
        out,
        block_counts,
        kept_total,
        last_kept,
        None if last_kept is None else workspace.spans,
        lse,
        out.stride(0),
        out.stride(1),
        *block_counts.stride(),
        batch,
        workspace.num_programs // kv_heads,
        kv_heads,
        G=group_size,
        D=head_dim,
        PAGE=page_size,
        REQUESTS=score_tile.REQUESTS,
        PARTS=PARTS,
        CHANNELS=channels,
        num_warps=4,
    )
