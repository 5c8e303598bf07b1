"""What each request reads in a decode step: blocks kept and all blocks, over layers and KV heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import BLOCK_SIZES, check_choice, check_dtype, check_inner_contiguous, check_rows, check_shape
from ._dispatch import use_triton

FIELDS = ("kept", "blocks")
"""What a row of `out` holds, in order."""


@triton.jit
def _request_totals_kernel(
    block_counts,
    seq_lens,
    out,
    layer_stride,
    row_stride,
    out_stride,
    counted_rows,
    dense_rows,
    all_rows,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    b = tl.program_id(0)
    blocks = tl.cdiv(tl.load(seq_lens + b), BLOCK_SIZE).to(tl.int64)
    kept = blocks * dense_rows
    if blocks > 0:
        for start in range(0, counted_rows, CHUNK):
            index = start + tl.arange(0, CHUNK)
            places = (index // KV_HEADS).to(tl.int64) * layer_stride + b * row_stride + index % KV_HEADS
            kept += tl.sum(tl.load(block_counts + places, mask=index < counted_rows, other=0).to(tl.int64))
    tl.store(out + b * out_stride, kept)
    tl.store(out + b * out_stride + 1, blocks * all_rows)


def request_totals(
    block_counts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    layers: int,
    dense_layers: int,
    block_size: int,
    out: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Writes `out[b]`: blocks that request b reads in this step, and blocks that it has, over layers and KV heads.

    `out[b, 0] = sum_lh block_counts[l, b, h] + dense_layers * Hkv * n` and `out[b, 1] = layers * Hkv * n` with
    `n = ceil(seq_lens[b] / block_size)`. Rows without tokens get zeros.

    Args:
        block_counts: `[S, >=B, Hkv]` int32, lengths of the block lists by layer, 0 in layers without lists; S may be 0.
            Not read for rows without tokens.
        seq_lens: `[B]` int32, tokens of each request; 0 marks a padded row.
        layers: layers of the model.
        dense_layers: those without lists, which read every block.
        block_size: tokens in a block.
        out: `[>=B, 2]` int64, output; rows from B on stay untouched.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    batch = seq_lens.shape[0]
    check_choice("block_size", block_size, BLOCK_SIZES)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_shape("block_counts", block_counts, None, None, None)
    check_dtype("block_counts", block_counts, torch.int32)
    check_inner_contiguous("block_counts", block_counts)
    if block_counts.shape[1] < batch:
        raise ValueError(f"block_counts has {block_counts.shape[1]} rows a layer; needed: at least {batch}")
    if not 0 <= dense_layers <= layers:
        raise ValueError(f"dense_layers is {dense_layers}; needed: 0 to layers={layers}")
    check_rows("out", out, batch, ndim=2)
    check_shape("out", out, None, len(FIELDS))
    check_dtype("out", out, torch.int64)
    check_inner_contiguous("out", out)
    run = _request_totals_triton if use_triton(impl, seq_lens) else request_totals_reference
    run(block_counts, seq_lens, layers=layers, dense_layers=dense_layers, block_size=block_size, out=out)


def _request_totals_triton(
    block_counts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    layers: int,
    dense_layers: int,
    block_size: int,
    out: torch.Tensor,
) -> None:
    batch = seq_lens.shape[0]
    if batch == 0:
        return
    counted_layers, _, kv_heads = block_counts.shape
    rows = counted_layers * kv_heads
    _request_totals_kernel[(batch,)](
        block_counts,
        seq_lens,
        out,
        block_counts.stride(0),
        block_counts.stride(1),
        out.stride(0),
        rows,
        dense_layers * kv_heads,
        layers * kv_heads,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        CHUNK=min(1024, max(32, triton.next_power_of_2(rows))),
        num_warps=1,
    )


def request_totals_reference(
    block_counts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    layers: int,
    dense_layers: int,
    block_size: int,
    out: torch.Tensor,
) -> None:
    """`request_totals` in plain torch."""
    batch, kv_heads = seq_lens.shape[0], block_counts.shape[2]
    blocks = (seq_lens.long() + block_size - 1) // block_size
    listed = torch.where(blocks > 0, block_counts[:, :batch].sum((0, 2)), 0)
    out[:batch, 0] = listed + dense_layers * kv_heads * blocks
    out[:batch, 1] = layers * kv_heads * blocks
