"""`pseudo_maximum` over split keys: each query head's largest score over the tokens of the forced blocks.

Keys of closed pages are what codes and residuals stand for, which is what attention reads of them; those of the open
page are exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _bfloat16_bits as bfloat16_bits
from . import _score_tile as score_tile
from ._checks import (
    MAX_GROUP_SIZE,
    check_dtype,
    check_inner_contiguous,
    check_rows,
    check_shape,
    check_sizes,
)
from ._dispatch import use_triton
from ._selection import forced_blocks
from .pseudo_maximum import forced_range
from .split_dequantise import _UNIT, _UNITS, _ZERO
from .split_keys import SplitKeys, reconstruct

_TILE = 64
"""Tokens that are scored together at most, in one page: tiles follow one another, each waiting for what it loads."""


def split_maximum_reference(
    q: torch.Tensor,
    keys: SplitKeys,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    out: torch.Tensor,
) -> None:
    """Torch reference of `split_maximum`."""
    kv_heads = keys.residual.shape[1]
    for b, length in enumerate(seq_lens[: q.shape[0]].tolist()):
        if length == 0 or length < min_context:
            continue
        sink, tail = forced_blocks(length, page_size, block_size, sink_tokens, window_tokens)
        tokens = torch.arange(length, device=q.device)
        tokens = tokens[(tokens // block_size < sink) | (tokens // block_size >= tail)]
        closed = length // page_size * page_size
        in_closed, in_open = tokens[tokens < closed], tokens[tokens >= closed]
        pages, own = page_table[b, in_closed // page_size].long().unique(return_inverse=True)
        whole = reconstruct(keys.codes[pages], keys.low_step[pages], keys.residual[pages])
        of_closed = whole[own, :, in_closed % page_size]
        of_open = keys.open_keys[int(keys.open_rows[b]) * page_size + in_open % page_size].float()
        queries = q[b].view(kv_heads, -1, q.shape[2]).float()
        scores = torch.matmul(queries, torch.cat((of_closed, of_open)).permute(1, 2, 0)) * scale
        scores = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
        # An empty maximum: nothing is forced.
        lowest = scores.new_full((*scores.shape[:2], 1), float("-inf"))
        out[b] = torch.cat((scores, lowest), -1).amax(-1)


@triton.jit(do_not_specialize=["sink_blocks", "window_tokens", "min_context"])
def _split_maximum_kernel(
    q,
    codes,
    low_step,
    residual,
    open_keys,
    open_rows,
    page_table,
    seq_lens,
    out,
    q_batch_stride,
    q_head_stride,
    page_table_stride,
    out_batch_stride,
    out_head_stride,
    scale_log2,
    kv_heads,
    sink_blocks,
    window_tokens,
    min_context,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
):
    b = tl.program_id(0) // kv_heads
    h = tl.program_id(0) % kv_heads
    length = tl.load(seq_lens + b)
    if (length > 0) & (length >= min_context):
        BYTES: tl.constexpr = D // 4
        sink, tail = forced_range(length, sink_blocks, window_tokens, PAGE, BLOCK)
        pages = page_table + b.to(tl.int64) * page_table_stride
        closed_end = length // PAGE * PAGE
        open_page = open_keys + ((tl.load(open_rows + b).to(tl.int64) * PAGE) * kv_heads + h) * D
        within = tl.arange(0, T)
        column = tl.arange(0, WIDTH)
        heads = tl.arange(0, GROUP)
        real = (column < BYTES)[None, :]
        queries = q + b.to(tl.int64) * q_batch_stride + (h * G + heads)[None, :] * q_head_stride
        query_mask = (column < BYTES)[:, None] & (heads < G)[None, :]
        # As in `pseudo_maximum`: the tiles of the sinks, then those from `tail` on; each is part of a page.
        sink_end = tl.minimum(sink * BLOCK, length)
        sink_tiles = tl.cdiv(sink_end, T)
        first_tile = tail * BLOCK // T
        tiles = sink_tiles + tl.cdiv(length, T) - first_tile
        highest = tl.full((GROUP,), float("-inf"), tl.float32)
        for index in range(tiles):
            is_sink = index < sink_tiles
            first = tl.where(is_sink, index, index - sink_tiles + first_tile) * T
            begin = tl.where(is_sink, 0, tail * BLOCK - first)
            end = tl.where(is_sink, sink_end, length) - first
            tokens = (first % PAGE + within)[:, None]
            scores = tl.zeros((T, GROUP), tl.float32)
            # Of a tile in the open page what the page table says is not read: its page may have no keys yet.
            closed = first < closed_end
            page = tl.load(pages + first // PAGE, mask=closed, other=0).to(tl.int64) * kv_heads + h
            in_page = real & closed
            packed = tl.load(codes + (page * PAGE + tokens) * BYTES + column[None, :], mask=in_page, other=0).to(
                tl.int32
            )
            for s in tl.static_range(4):
                channels = s * BYTES + column
                query = tl.load(queries + channels[:, None], mask=query_mask, other=0.0).to(tl.float32)
                rest = tl.load(residual + (page * PAGE + tokens) * D + channels[None, :], mask=in_page, other=0)
                low = tl.load(low_step + page * 2 * D + channels[None, :], mask=in_page, other=0)
                step = tl.load(low_step + page * 2 * D + D + channels[None, :], mask=in_page, other=0)
                levels = ((packed >> (2 * s)) & 3) * _UNITS + rest.to(tl.int32) - _ZERO
                whole = bfloat16_bits.to_float(low) + levels.to(tl.float32) * (bfloat16_bits.to_float(step) * _UNIT)
                # Beyond `length` rows of the open page may hold anything; theirs is a row each, which gets -inf below.
                exact = tl.load(
                    open_page + tokens * (kv_heads * D) + channels[None, :],
                    mask=real & (first >= closed_end),
                    other=0.0,
                )
                part = tl.where(in_page, whole, exact.to(tl.float32))
                scores += tl.dot(part, query, input_precision="ieee")
            scores *= scale_log2
            scores = tl.where(scores == scores, scores, float("inf"))
            inside = (within >= begin) & (within < end)
            highest = tl.maximum(highest, tl.max(tl.where(inside[:, None], scores, float("-inf")), 0))
        row = out + b.to(tl.int64) * out_batch_stride + h * out_head_stride
        tl.store(row + heads, highest * score_tile.LN_2, mask=heads < G)


def split_maximum(
    q: torch.Tensor,
    keys: SplitKeys,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    out: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Writes `max_t scale * (q . k_t)`, in nats, over the tokens of each row's forced blocks, from split keys.

    Args:
        q: `[B, Hkv * G, D]`, dtype of the open keys, G from 1 to 16.
        keys: the layer's keys, see `SplitKeys`.
        page_table: `[>=B, max_pages]` int32; of a row only the entries of its closed pages are read.
        seq_lens: `[>=B]` int32, in tokens; 0 for padded rows, which stay untouched.
        scale: factor of the scores.
        page_size: tokens in a page.
        block_size: tokens in a block; divides `page_size`.
        sink_tokens, window_tokens: as in `coverage_rule`.
        min_context: rows with fewer tokens stay untouched.
        out: `[B, Hkv, G]` fp32. +inf where a score is no number, -inf where nothing is forced.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_sizes(page_size, block_size)
    check_shape("q", q, None, None, None)
    check_inner_contiguous("q", q)
    keys.check(q, page_size)
    batch, heads, head_dim = q.shape
    kv_heads = keys.residual.shape[1]
    group_size, rest = divmod(heads, kv_heads)
    if rest or not 1 <= group_size <= MAX_GROUP_SIZE:
        raise ValueError(f"q has {heads} heads for {kv_heads} KV heads; needed: 1 to {MAX_GROUP_SIZE} for each KV head")
    check_rows("page_table", page_table, batch, ndim=2)
    check_dtype("page_table", page_table, torch.int32)
    check_inner_contiguous("page_table", page_table)
    check_rows("seq_lens", seq_lens, batch)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_shape("out", out, batch, kv_heads, group_size)
    check_dtype("out", out, torch.float32)
    check_inner_contiguous("out", out)
    if not use_triton(impl, q):
        split_maximum_reference(
            q,
            keys,
            page_table,
            seq_lens,
            scale=scale,
            page_size=page_size,
            block_size=block_size,
            sink_tokens=sink_tokens,
            window_tokens=window_tokens,
            min_context=min_context,
            out=out,
        )
        return
    if batch == 0:
        return
    _split_maximum_kernel[(batch * kv_heads,)](
        q,
        keys.codes,
        keys.low_step.view(torch.int16),
        keys.residual,
        keys.open_keys,
        keys.open_rows,
        page_table,
        seq_lens,
        out,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        out.stride(0),
        out.stride(1),
        scale * score_tile.LOG2_E.value,
        kv_heads,
        -(-sink_tokens // block_size),
        window_tokens,
        min_context,
        G=group_size,
        GROUP=score_tile.padded_group(group_size),
        D=head_dim,
        WIDTH=max(16, triton.next_power_of_2(head_dim // 4)),
        PAGE=page_size,
        BLOCK=block_size,
        T=min(page_size, _TILE),
        num_warps=4,
    )
