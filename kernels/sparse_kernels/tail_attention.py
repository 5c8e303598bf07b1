"""Adds the blocks that were not read to a sparse attention: mean values, weighted by the blocks' estimated mass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _attention_plan as plan
from ._attention_plan import AttentionWorkspace, blocks_to_tiles, program_share, row_blocks
from ._checks import (
    HEAD_DIMS,
    KV_DTYPES,
    MAX_GROUP_SIZE,
    check_choice,
    check_contiguous,
    check_dtype,
    check_inner_contiguous,
    check_rows,
    check_shape,
    check_sizes,
)
from ._dispatch import use_triton
from .combine import CHANNELS, LOG2_E, PARTS, add_parts, row_parts

__all__ = ["tail_attention", "tail_attention_reference"]

CELLS = 32
"""Cells of a tile, the unit of work."""

_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)


def tail_attention_reference(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    block_counts: torch.Tensor,
    kept_mask: torch.Tensor,
    value_means: torch.Tensor,
    page_table: torch.Tensor,
    lse: torch.Tensor,
    *,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    workspace: AttentionWorkspace | None = None,
) -> None:
    """`tail_attention` in plain torch; `workspace` is not used."""
    batch, kv_heads, group, _ = log_mass.shape
    per_cell = page_size // value_means.shape[2] // block_size
    for b, length in enumerate(seq_lens[:batch].tolist()):
        pages = page_table[b, : length // page_size].long()
        closed = len(pages) * (page_size // block_size)
        leaves_out = (block_counts[b] < -(-length // block_size))[:, None]
        left_out = (leaves_out & (kept_mask[b, :, :closed] == 0))[:, None]
        mass = log_mass[b, :, :, :closed].masked_fill(~left_out, float("-inf"))
        joined = torch.cat((lse[b].view(kv_heads, group, 1), mass), -1)
        weights = joined.softmax(-1)
        by_cell = weights[..., 1:].unflatten(-1, (closed // per_cell, per_cell)).sum(-1)
        means = value_means[pages].transpose(0, 1).flatten(1, 2).float()
        row = out[b].view(kv_heads, group, -1)
        added = weights[..., :1] * row.float() + by_cell @ means
        has_tail = leaves_out[:, None] & (mass > float("-inf")).any(-1, keepdim=True)
        row.copy_(torch.where(has_tail, added.to(out.dtype), row))


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _tail_attention_kernel(
    log_mass_ptr,
    seq_lens_ptr,
    counts_ptr,
    kept_ptr,
    means_ptr,
    page_table_ptr,
    lse_ptr,
    out_ptr,
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    mass_stride_b,
    mass_stride_h,
    mass_stride_g,
    kept_stride_b,
    kept_stride_h,
    page_table_stride,
    out_stride_b,
    out_stride_h,
    num_rows,
    num_programs,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CELLS_PER_PAGE: tl.constexpr,
    CELLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    BLOCKS_PER_CELL: tl.constexpr = PAGE_SIZE // CELLS_PER_PAGE // BLOCK_SIZE
    TILE: tl.constexpr = CELLS * BLOCKS_PER_CELL * BLOCK_SIZE
    program = tl.program_id(0)
    cursor, end, row, before = program_share(
        program, num_programs, num_rows, num_kv_heads, seq_lens_ptr, counts_ptr, BLOCK_SIZE, TILE, True, ROWS, PAGE_SIZE
    )
    queries = tl.arange(0, 16)
    channels = tl.arange(0, HEAD_DIM_PAD)
    in_group = queries < GROUP
    in_head = channels < HEAD_DIM
    out_mask = in_group[:, None] & in_head[None, :]

    while cursor < end:
        blocks = row_blocks(row, num_rows, num_kv_heads, seq_lens_ptr, counts_ptr, BLOCK_SIZE, True, PAGE_SIZE)
        tiles = blocks_to_tiles(blocks, BLOCK_SIZE, TILE)
        first_tile = cursor - before
        stop_tile = tl.minimum(end - before, tiles)
        if first_tile < stop_tile:
            b = (row // num_kv_heads).to(tl.int64)
            h = row % num_kv_heads
            page_row_ptr = page_table_ptr + b * page_table_stride
            kept_row_ptr = kept_ptr + b * kept_stride_b + h * kept_stride_h
            mass_row_ptr = log_mass_ptr + b * mass_stride_b + h * mass_stride_h
            highest = tl.full((16,), float("-inf"), tl.float32)
            weight_sum = tl.zeros((16,), tl.float32)
            acc = tl.zeros((16, HEAD_DIM_PAD), tl.float32)
            for tile in range(first_tile, stop_tile):
                cells = tile * CELLS + tl.arange(0, CELLS)
                exists = cells * BLOCKS_PER_CELL < blocks
                pages = tl.load(page_row_ptr + cells // CELLS_PER_PAGE, mask=exists, other=0)
                places = (pages.to(tl.int64) * num_kv_heads + h) * CELLS_PER_PAGE + cells % CELLS_PER_PAGE
                means = tl.load(
                    means_ptr + places[:, None] * HEAD_DIM + channels[None, :],
                    mask=exists[:, None] & in_head[None, :],
                    other=0.0,
                )
                of_tile = tile * (CELLS * BLOCKS_PER_CELL) + tl.arange(0, CELLS * BLOCKS_PER_CELL)
                inside = of_tile < blocks
                kept = tl.load(kept_row_ptr + of_tile, mask=inside, other=1)
                mass = tl.load(
                    mass_row_ptr + queries[:, None] * mass_stride_g + of_tile[None, :],
                    mask=in_group[:, None] & inside[None, :],
                    other=float("-inf"),
                )
                mass = tl.where((kept == 0)[None, :], mass * _LOG2_E, float("-inf"))
                new_highest = tl.maximum(highest, tl.max(mass, 1))
                # While nothing was left out the maximum is -inf: shift by 0 so that no -inf - -inf arises.
                shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
                decay = tl.exp2(highest - shift)
                weights = tl.exp2(mass - shift[:, None])
                weight_sum = weight_sum * decay + tl.sum(weights, 1)
                by_cell = tl.sum(tl.reshape(weights, (16, CELLS, BLOCKS_PER_CELL)), 2)
                acc = acc * decay[:, None]
                acc = tl.dot(by_cell.to(means.dtype), means, acc, input_precision="ieee")
                highest = new_highest

            if (first_tile == 0) & (stop_tile == tiles):
                heads = h * GROUP + queries
                read = tl.load(lse_ptr + b * num_kv_heads * GROUP + heads, mask=in_group, other=0.0) * _LOG2_E
                target = out_ptr + b * out_stride_b + heads[:, None] * out_stride_h + channels[None, :]
                attended = tl.load(target, mask=out_mask, other=0.0).to(tl.float32)
                shift = tl.maximum(highest, read)
                shift = tl.where(shift == float("-inf"), 0.0, shift)
                of_read = tl.exp2(read - shift)
                of_tail = tl.exp2(highest - shift)
                total = of_read + of_tail * weight_sum
                result = (attended * of_read[:, None] + acc * of_tail[:, None]) / tl.where(total > 0, total, 1.0)[
                    :, None
                ]
                tl.store(target, result.to(out_ptr.dtype.element_ty), mask=out_mask)
            else:
                slot = 2 * program + (first_tile == 0).to(tl.int32)
                parts = slot * GROUP + queries
                tl.store(partial_out_ptr + parts[:, None] * HEAD_DIM + channels[None, :], acc, mask=out_mask)
                tl.store(partial_max_ptr + parts, highest, mask=in_group)
                tl.store(partial_sum_ptr + parts, weight_sum, mask=in_group)
        # Past `end` if a later program goes on with this row.
        before += tiles
        cursor = before
        row += 1


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _merge_kernel(
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    seq_lens_ptr,
    counts_ptr,
    lse_ptr,
    out_ptr,
    out_stride_b,
    out_stride_h,
    num_rows,
    num_programs,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0)
    g = tl.program_id(1) % GROUP
    channels = (tl.program_id(1) // GROUP) * CHANNELS + tl.arange(0, CHANNELS)
    tiles, first, last = row_parts(
        row,
        num_rows,
        num_programs,
        num_kv_heads,
        seq_lens_ptr,
        counts_ptr,
        BLOCK_SIZE,
        TILE,
        True,
        ROWS,
        PAGE_SIZE,
    )
    # Rows inside one program are complete, and rows that leave nothing out stay as they are.
    if (tiles > 0) & (first < last):
        b = (row // num_kv_heads).to(tl.int64)
        head = (row % num_kv_heads) * GROUP + g
        target = out_ptr + b * out_stride_b + head * out_stride_h + channels
        read = tl.load(lse_ptr + b * num_kv_heads * GROUP + head) * _LOG2_E
        attended = tl.load(target, mask=channels < HEAD_DIM, other=0.0).to(tl.float32)
        _, weight_sum, acc = add_parts(
            read,
            tl.full((), 1.0, tl.float32),
            attended,
            first,
            last + 1,
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
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=channels < HEAD_DIM)


def _check(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    block_counts: torch.Tensor,
    kept_mask: torch.Tensor,
    value_means: torch.Tensor,
    page_table: torch.Tensor,
    lse: torch.Tensor,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    workspace: AttentionWorkspace | None,
) -> None:
    """Raises ValueError unless the arguments fit together; reads no value on the device."""
    check_sizes(page_size, block_size)
    check_shape("log_mass", log_mass, None, None, None, None)
    check_dtype("log_mass", log_mass, torch.float32)
    check_inner_contiguous("log_mass", log_mass)
    batch, kv_heads, group, capacity = log_mass.shape
    check_choice("group size of log_mass", group, tuple(range(1, MAX_GROUP_SIZE + 1)))
    check_rows("seq_lens", seq_lens, batch)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_rows("block_counts", block_counts, batch, ndim=2)
    check_shape("block_counts", block_counts, None, kv_heads)
    check_dtype("block_counts", block_counts, torch.int32)
    check_contiguous("block_counts", block_counts)
    check_rows("kept_mask", kept_mask, batch, ndim=3)
    check_shape("kept_mask", kept_mask, None, kv_heads, capacity)
    check_dtype("kept_mask", kept_mask, torch.uint8)
    check_inner_contiguous("kept_mask", kept_mask)
    check_shape("out", out, batch, kv_heads * group, None)
    check_dtype("out", out, *KV_DTYPES)
    check_inner_contiguous("out", out)
    check_choice("head dimension of out", out.shape[2], HEAD_DIMS)
    check_shape("value_means", value_means, None, kv_heads, None, out.shape[2])
    check_dtype("value_means", value_means, out.dtype)
    check_contiguous("value_means", value_means)
    cells = value_means.shape[2]
    allowed = tuple(n for n in (1, 2, 4, 8, 16) if page_size % n == 0 and page_size // n % block_size == 0)
    check_choice("cells a page in value_means", cells, allowed)
    check_rows("page_table", page_table, batch, ndim=2)
    check_dtype("page_table", page_table, torch.int32)
    check_inner_contiguous("page_table", page_table)
    check_shape("lse", lse, batch, kv_heads * group)
    check_dtype("lse", lse, torch.float32)
    check_contiguous("lse", lse)
    if workspace is not None:
        shape = (2 * workspace.num_programs, group, out.shape[2])
        check_shape("workspace.partial_out", workspace.partial_out, *shape)


def tail_attention(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    block_counts: torch.Tensor,
    kept_mask: torch.Tensor,
    value_means: torch.Tensor,
    page_table: torch.Tensor,
    lse: torch.Tensor,
    *,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    workspace: AttentionWorkspace | None,
    impl: str = "auto",
) -> None:
    """Adds the blocks that `sparse_attention` did not read to its result, in place.

    With the attention `o` of a query head over its row's listed blocks and its log-sum-exp `lse`,
    `out = (exp(lse) o + sum_j w_j m_j) / (exp(lse) + sum_j w_j)` over the blocks `j` of closed pages that are not
    listed, where `w_j = exp(log_mass[j])` and `m_j` is the mean value of the block's cell: a page, or an equal part of
    one that holds whole blocks. Blocks of log mass -inf add nothing. Sums are fp32; the weights of a cell are rounded
    to the type of the means before they are multiplied with them, as attention does with its own.

    Rows that keep all their blocks, empty ones among them, stay as they are: `log_mass`, `kept_mask` and `lse` are not
    read for them. Two launches that share the work as `sparse_attention` does: grids and buffers do not depend on data,
    nothing is allocated and the host is not synchronised.

    Args:
        log_mass: `[B, Hkv, G, N]` fp32, `G` in 1..16; last dimension contiguous. Neither NaN nor +inf in rows that
            leave blocks out, which the rules see to.
        seq_lens: `[>=B]` int32.
        block_counts: `[>=B, Hkv]` int32, contiguous: blocks listed in each row.
        kept_mask: `[>=B, Hkv, N]` uint8: whether a block is listed, as the rules write it; last dimension contiguous.
        value_means: `[P, Hkv, C, D]` in out's dtype, contiguous: mean values of the `C` cells of each closed page.
        page_table: `[>=B, max_pages]` int32, physical pages; read for closed pages.
        lse: `[B, Hq]` fp32, contiguous: as `sparse_attention` writes it.
        page_size: tokens of a page: 16, 32, 64 or 128.
        block_size: tokens of a block: 8, 16, 32 or 64; divides the tokens of a cell.
        out: `[B, Hq, D]`, fp16, bf16 or fp32, last dimension contiguous: the attention, changed in place.
        workspace: that of `sparse_attention` serves, after it; may be None where the torch reference runs.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size does not fit; the message names the argument.
    """
    _check(
        log_mass,
        seq_lens,
        block_counts,
        kept_mask,
        value_means,
        page_table,
        lse,
        page_size,
        block_size,
        out,
        workspace,
    )
    if not use_triton(impl, out):
        tail_attention_reference(
            log_mass,
            seq_lens,
            block_counts,
            kept_mask,
            value_means,
            page_table,
            lse,
            page_size=page_size,
            block_size=block_size,
            out=out,
        )
        return
    if workspace is None:
        raise ValueError("workspace is needed by the Triton kernels")
    batch, kv_heads, group, _ = log_mass.shape
    if batch == 0:
        return
    head_dim = out.shape[2]
    cells_per_page = value_means.shape[2]
    _tail_attention_kernel[(workspace.num_programs,)](
        log_mass,
        seq_lens,
        block_counts,
        kept_mask,
        value_means,
        page_table,
        lse,
        out,
        workspace.partial_out,
        workspace.partial_max,
        workspace.partial_sum,
        *log_mass.stride()[:3],
        *kept_mask.stride()[:2],
        page_table.stride(0),
        out.stride(0),
        out.stride(1),
        batch * kv_heads,
        workspace.num_programs,
        kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        PAGE_SIZE=page_size,
        BLOCK_SIZE=block_size,
        CELLS_PER_PAGE=cells_per_page,
        CELLS=CELLS,
        ROWS=plan.PLAN_ROWS,
        num_warps=4,
        num_stages=2,
    )
    channels = min(CHANNELS, triton.next_power_of_2(head_dim))
    _merge_kernel[(batch * kv_heads, group * triton.cdiv(head_dim, channels))](
        workspace.partial_out,
        workspace.partial_max,
        workspace.partial_sum,
        seq_lens,
        block_counts,
        lse,
        out,
        out.stride(0),
        out.stride(1),
        batch * kv_heads,
        workspace.num_programs,
        kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_SIZE=block_size,
        TILE=CELLS * (page_size // cells_per_page),
        ROWS=plan.PLAN_ROWS,
        PARTS=PARTS,
        CHANNELS=channels,
        num_warps=4,
    )
