"""Pseudo-maximum: each query head's largest exact score over the tokens of the forced blocks.

It stands in for the largest score of the row in rule `top-delta` (FFD). Scores from low-bit keys would put it too high
and lose blocks; the tokens of sinks, window and open page are read anyway, and hold the maximum more often than not.
"""

import torch
import triton
import triton.language as tl

from . import _score_tile as score_tile
from ._checks import (
    MAX_GROUP_SIZE,
    check_dtype,
    check_inner_contiguous,
    check_pool,
    check_rows,
    check_shape,
    check_sizes,
)
from ._dispatch import use_triton
from ._reference import rows_to_score
from ._selection import forced_blocks


def pseudo_maximum_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
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
    """Torch reference of `pseudo_maximum`."""
    for row in rows_to_score(q, k_pool, page_table, seq_lens, page_size, min_context):
        sink, tail = forced_blocks(row.length, page_size, block_size, sink_tokens, window_tokens)
        tokens = torch.arange(row.length, device=q.device)
        tokens = tokens[(tokens // block_size < sink) | (tokens // block_size >= tail)]
        keys = k_pool[row.pages[tokens // page_size] * page_size + tokens % page_size].float()
        scores = torch.matmul(row.q, keys.permute(1, 2, 0)) * scale
        scores = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
        # An empty maximum: nothing is forced.
        lowest = scores.new_full((*scores.shape[:2], 1), float("-inf"))
        out[row.index] = torch.cat((scores, lowest), -1).amax(-1)


def forced_tile(page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens that `row_maximum` scores together: part of a page, 8 KiB of keys."""
    return max(16, min(page_size, 8192 // (triton.next_power_of_2(head_dim) * dtype.itemsize)))


@triton.jit
def forced_range(length, sink_blocks, window_tokens, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """A row's forced blocks: those below the first and those from the second number on."""
    tail = length // PAGE * (PAGE // BLOCK)
    in_window = tl.maximum(length - window_tokens, 0) // BLOCK
    tail = tl.where(window_tokens > 0, tl.minimum(tail, in_window), tail)
    return tl.minimum(sink_blocks, tail), tail


@triton.jit
def row_maximum(
    query,
    keys,
    slot_stride,
    pages,
    length,
    sink,
    tail,
    scale_log2,
    T: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Largest score times log2(e) over a row's forced blocks, `[GROUP]`; +inf where one is no number.

    Args:
        query: `[ROWS, GROUP]`, zeros beyond D and G.
        keys: the pool, at the row's KV head.
        pages: the row of the page table.
    """
    # Tiles are parts of pages, so that a tile's address is a scalar: those of the sinks, then those from `tail` on.
    sink_end = tl.minimum(sink * BLOCK, length)
    sink_tiles = tl.cdiv(sink_end, T)
    first_tile = tail * BLOCK // T
    tiles = sink_tiles + tl.cdiv(length, T) - first_tile
    within = tl.arange(0, T)
    channels = tl.arange(0, query.shape[0])[None, :]
    offsets = within[:, None] * slot_stride + channels
    highest = tl.full((query.shape[1],), float("-inf"), tl.float32)
    for index in tl.range(0, tiles, num_stages=STAGES):
        is_sink = index < sink_tiles
        first = tl.where(is_sink, index, index - sink_tiles + first_tile) * T
        begin = tl.where(is_sink, 0, tail * BLOCK - first)
        end = tl.where(is_sink, sink_end, length) - first
        slot = tl.load(pages + first // PAGE).to(tl.int64) * PAGE + first % PAGE
        # Slots of the page beyond these tokens may hold anything; theirs is a row each, which gets -inf below.
        tile = tl.load(keys + slot * slot_stride + offsets, mask=channels < D, other=0.0)
        scores = tl.dot(tile, query, input_precision="ieee") * scale_log2
        scores = tl.where(scores == scores, scores, float("inf"))
        inside = (within >= begin) & (within < end)
        highest = tl.maximum(highest, tl.max(tl.where(inside[:, None], scores, float("-inf")), 0))
    return highest


@triton.jit(do_not_specialize=["sink_blocks", "window_tokens", "min_context"])
def _pseudo_maximum_kernel(
    q,
    k_pool,
    page_table,
    seq_lens,
    out,
    q_batch_stride,
    q_head_stride,
    slot_stride,
    head_stride,
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
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
):
    b = tl.program_id(0) // kv_heads
    h = tl.program_id(0) % kv_heads
    length = tl.load(seq_lens + b)
    if (length > 0) & (length >= min_context):
        sink, tail = forced_range(length, sink_blocks, window_tokens, PAGE, BLOCK)
        query = score_tile.load_query(q, q_batch_stride, q_head_stride, b, h, D, G, ROWS, GROUP)
        pages = page_table + b.to(tl.int64) * page_table_stride
        keys = k_pool + h * head_stride
        highest = row_maximum(query, keys, slot_stride, pages, length, sink, tail, scale_log2, T, D, PAGE, BLOCK, 5)
        heads = tl.arange(0, GROUP)
        row = out + b.to(tl.int64) * out_batch_stride + h * out_head_stride
        tl.store(row + heads, highest * score_tile.LN_2, mask=heads < G)


def pseudo_maximum(
    q: torch.Tensor,
    k_pool: torch.Tensor,
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
    """Writes `max_t scale * (q . k_t)`, in nats, over the tokens of each row's forced blocks, from their keys.

    Forced blocks are those of the rules: with a token of the sinks, of the window or of the open page.

    Args:
        q: `[B, Hkv * G, D]`, pool dtype, G from 1 to 16.
        k_pool: `[P * page_size, Hkv, D]` fp16, bf16 or fp32.
        page_table: `[>=B, max_pages]` int32; only the first `ceil(seq_len / page_size)` entries of a row are read.
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
    check_pool("k_pool", k_pool, page_size)
    _, kv_heads, head_dim = k_pool.shape
    check_shape("q", q, None, None, head_dim)
    check_dtype("q", q, k_pool.dtype)
    check_inner_contiguous("q", q)
    batch, heads, _ = q.shape
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
        pseudo_maximum_reference(
            q,
            k_pool,
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
    _pseudo_maximum_kernel[(batch * kv_heads,)](
        q,
        k_pool,
        page_table,
        seq_lens,
        out,
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
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
        ROWS=triton.next_power_of_2(head_dim),
        PAGE=page_size,
        BLOCK=block_size,
        T=forced_tile(page_size, head_dim, q.dtype),
        num_warps=4,
    )
