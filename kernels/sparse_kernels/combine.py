"""Merges the partial results of rows that several programs of `sparse_attention` shared."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _attention_plan as plan
from ._attention_plan import AttentionWorkspace
from ._checks import KV_DTYPES, check_contiguous, check_dtype, check_inner_contiguous, check_rows, check_shape
from ._dispatch import use_triton

__all__ = ["combine", "combine_reference"]

LOG2_E = 1.4426950408889634
LN_2: tl.constexpr = tl.constexpr(1 / LOG2_E)

PARTS = 32
CHANNELS = 64


def combine_reference(
    workspace: AttentionWorkspace,
    seq_lens: torch.Tensor,
    block_counts: torch.Tensor | None,
    *,
    block_size: int,
    tile: int,
    page_size: int = 1,
    tail_tile: int = 0,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """`combine` in plain torch."""
    batch, num_q_heads, _ = out.shape
    group = workspace.partial_max.shape[1]
    num_kv_heads = num_q_heads // group
    counts = None if block_counts is None else block_counts[:batch]
    sizes = {"block_size": block_size, "tile": tile, "page_size": page_size, "tail_tile": tail_tile}
    tiles = plan.tiles_per_row(seq_lens[:batch], counts, num_kv_heads, **sizes)
    total = sum(tiles)
    working = min(workspace.num_programs, total)
    before = 0
    for row, row_tiles in enumerate(tiles):
        b, h = divmod(row, num_kv_heads)
        target = out[b, h * group : (h + 1) * group]
        if row_tiles == 0:
            target.zero_()
            if lse is not None:
                lse[b, h * group : (h + 1) * group] = float("-inf")
            continue
        first = ((before + 1) * working - 1) // total
        last = ((before + row_tiles) * working - 1) // total
        before += row_tiles
        if first == last:
            continue
        slots = [2 * first + 1] + [2 * program for program in range(first + 1, last + 1)]
        highest = workspace.partial_max[slots]
        weights = torch.exp2(highest - highest.amax(0))
        weight_sum = (weights * workspace.partial_sum[slots]).sum(0)
        target.copy_((weights[:, :, None] * workspace.partial_out[slots]).sum(0) / weight_sum[:, None])
        if lse is not None:
            lse[b, h * group : (h + 1) * group] = (highest.amax(0) + weight_sum.log2()) / LOG2_E


@triton.jit
def add_parts(
    highest,
    weight_sum,
    acc,
    first,
    stop,
    g,
    channels,
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A running softmax (maximum, sum, `acc [channels]`) of head `g`, with the parts of programs `first` to `stop`."""
    for start in range(first, stop, PARTS):
        programs = start + tl.arange(0, PARTS)
        slots = 2 * programs + (programs == first).to(tl.int32)
        present = programs < stop
        part_max = tl.load(partial_max_ptr + slots * GROUP + g, mask=present, other=float("-inf"))
        part_sum = tl.load(partial_sum_ptr + slots * GROUP + g, mask=present, other=0.0)
        part = tl.load(
            partial_out_ptr + (slots[:, None] * GROUP + g) * HEAD_DIM + channels[None, :],
            mask=present[:, None] & (channels < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_highest = tl.maximum(highest, tl.max(part_max, 0))
        # While no part had any weight the maximum is -inf: shift by 0 so that no -inf - -inf arises.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        decay = tl.exp2(highest - shift)
        weights = tl.exp2(part_max - shift)
        acc = acc * decay + tl.sum(weights[:, None] * part, 0)
        weight_sum = weight_sum * decay + tl.sum(weights * part_sum, 0)
        highest = new_highest
    return highest, weight_sum, acc


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _combine_kernel(
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    seq_lens_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    out_stride_b,
    out_stride_h,
    num_rows,
    num_programs,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0)
    g = tl.program_id(1) % GROUP
    channels = (tl.program_id(1) // GROUP) * CHANNELS + tl.arange(0, CHANNELS)
    in_head = channels < HEAD_DIM
    tiles, first, last = plan.row_parts(
        row,
        num_rows,
        num_programs,
        num_kv_heads,
        seq_lens_ptr,
        counts_ptr,
        BLOCK_SIZE,
        PAGE_SIZE,
        TILE,
        TAIL_TILE,
        HAS_LISTS,
        ROWS,
    )
    shared = (tiles > 0) & (first < last)

    # Rows inside one program are in `out` already.
    if shared | (tiles == 0):
        highest, weight_sum, acc = add_parts(
            tl.full((), float("-inf"), tl.float32),
            tl.zeros((), tl.float32),
            tl.zeros((CHANNELS,), tl.float32),
            first,
            tl.where(shared, last + 1, first),
            g,
            channels,
            partial_out_ptr,
            partial_max_ptr,
            partial_sum_ptr,
            GROUP,
            HEAD_DIM,
            PARTS,
        )
        result = acc / tl.where(weight_sum > 0, weight_sum, 1.0)
        b = (row // num_kv_heads).to(tl.int64)
        head = (row % num_kv_heads) * GROUP + g
        tl.store(
            out_ptr + b * out_stride_b + head * out_stride_h + channels,
            result.to(out_ptr.dtype.element_ty),
            mask=in_head,
        )
        if lse_ptr is not None:  # noqa: SIM102 - a condition of the compiler's
            if tl.program_id(1) < GROUP:
                heads = num_kv_heads * GROUP
                tl.store(lse_ptr + b * heads + head, (highest + tl.log2(weight_sum)) * LN_2)


def combine(
    workspace: AttentionWorkspace,
    seq_lens: torch.Tensor,
    block_counts: torch.Tensor | None,
    *,
    block_size: int,
    tile: int,
    page_size: int = 1,
    tail_tile: int = 0,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Completes `out` after the attention kernel: merges shared rows, writes zeros to empty ones, leaves the others.

    With parts `i` of a row, `out = sum_i 2**(max_i - m) out_i / sum_i 2**(max_i - m) sum_i`, `m` the largest `max_i`:
    the split-softmax identity of FlashDecoding, in fp32. Which programs share a row is recomputed from the counts
    (`_attention_plan`), so these arguments must be those that the attention kernel ran with.

    Args:
        workspace: the parts, see `AttentionWorkspace`; its group size is `G`.
        seq_lens: `[>=B]` int32; 0 marks an empty request.
        block_counts: `[>=B, Hkv]` int32, contiguous; None if all blocks were attended to.
        block_size: tokens of a block.
        tile: listed tokens of a tile, `tile_config(...).tile`.
        page_size: tokens of a page; matters if there is a tail.
        tail_tile: tokens that a tile of the tail stands for; 0 if there is no tail.
        out: `[B, Hq, D]`, fp16, bf16 or fp32, last dimension contiguous.
        lse: `[B, Hq]` fp32, contiguous; gets the log-sum-exp (natural) of the scores of the same rows, tail included,
            -inf for empty ones; optional.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
    """
    check_shape("out", out, None, None, None)
    check_dtype("out", out, *KV_DTYPES)
    check_inner_contiguous("out", out)
    batch, num_q_heads, head_dim = out.shape
    group = workspace.partial_out.shape[1]
    check_shape("workspace.partial_out", workspace.partial_out, 2 * workspace.num_programs, group, head_dim)
    num_kv_heads, rest = divmod(num_q_heads, group)
    if rest:
        raise ValueError(f"out has {num_q_heads} query heads; needed: a multiple of the workspace's group size {group}")
    check_rows("seq_lens", seq_lens, batch)
    check_dtype("seq_lens", seq_lens, torch.int32)
    if block_counts is not None:
        check_rows("block_counts", block_counts, batch, ndim=2)
        check_shape("block_counts", block_counts, None, num_kv_heads)
        check_dtype("block_counts", block_counts, torch.int32)
        check_contiguous("block_counts", block_counts)
    if lse is not None:
        check_shape("lse", lse, batch, num_q_heads)
        check_dtype("lse", lse, torch.float32)
        check_contiguous("lse", lse)
    if not use_triton(impl, out):
        sizes = {"block_size": block_size, "tile": tile, "page_size": page_size, "tail_tile": tail_tile}
        combine_reference(workspace, seq_lens, block_counts, **sizes, out=out, lse=lse)
        return
    if batch == 0:
        return
    channels = min(CHANNELS, triton.next_power_of_2(head_dim))
    _combine_kernel[(batch * num_kv_heads, group * triton.cdiv(head_dim, channels))](
        workspace.partial_out,
        workspace.partial_max,
        workspace.partial_sum,
        seq_lens,
        block_counts,
        out,
        lse,
        out.stride(0),
        out.stride(1),
        batch * num_kv_heads,
        workspace.num_programs,
        num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        PAGE_SIZE=page_size,
        TILE=tile,
        TAIL_TILE=tail_tile,
        HAS_LISTS=block_counts is not None,
        ROWS=plan.PLAN_ROWS,
        PARTS=PARTS,
        CHANNELS=channels,
        num_warps=4,
    )
