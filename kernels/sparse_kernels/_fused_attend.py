"""What a program of `fused_top_delta` does with the blocks that it keeps and with the mass of the others."""

import triton
import triton.language as tl

from . import _fused_plan as plan


@triton.jit
def attend(
    highest,
    weight_sum,
    acc,
    query,
    slots_ptr,
    count,
    partial_slot,
    partial_tokens,
    k_head_ptr,
    v_head_ptr,
    k_stride_t,
    v_stride_t,
    scale_log2,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A running softmax (`highest [GROUP]`, `weight_sum [GROUP]`, `acc [D, GROUP]`) with the tokens of `count` blocks.

    `query` is `[D, GROUP]`. The block at `partial_slot` has `partial_tokens` only.
    """
    limit = count * BLOCK
    tile_tokens = tl.arange(0, TILE)
    offset = tile_tokens % BLOCK
    channels = tl.arange(0, acc.shape[0])
    in_head = (channels < D)[None, :]
    k_offsets = offset[:, None] * k_stride_t + channels[None, :]
    # Values are loaded as they are multiplied, channels in rows: transposed later, they would take another way.
    v_offsets = offset[None, :] * v_stride_t + channels[:, None]
    for start in tl.range(0, limit, TILE, num_stages=STAGES):
        if TILE <= BLOCK:
            # One block: its address is a scalar, and the offsets in it are those of every other tile.
            first = tl.load(slots_ptr + start // BLOCK)
            inside = start % BLOCK
            valid = (first != partial_slot) | (inside + offset < partial_tokens)
            first = (first + inside).to(tl.int64)
            k_tile = k_head_ptr + first * k_stride_t
            v_tile = v_head_ptr + first * v_stride_t
        else:
            listed = start + tile_tokens
            first = tl.load(slots_ptr + listed // BLOCK, mask=listed < limit, other=0)
            valid = (listed < limit) & ((first != partial_slot) | (offset < partial_tokens))
            first = first.to(tl.int64)
            k_tile = k_head_ptr + first[:, None] * k_stride_t
            v_tile = v_head_ptr + first[None, :] * v_stride_t
        k = tl.load(k_tile + k_offsets, mask=valid[:, None] & in_head, other=0.0)
        v = tl.load(v_tile + v_offsets, mask=valid[None, :] & (channels < D)[:, None], other=0.0)
        # Heads are columns: there are few of them, and tensor cores take 16 rows, but 8 columns, at once.
        scores = tl.dot(k, query, input_precision="ieee") * scale_log2
        scores = tl.where(valid[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 0))
        # While nothing was valid the maximum is -inf: shift by 0 so that no -inf - -inf arises.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        decay = tl.exp2(highest - shift)
        weights = tl.exp2(scores - shift[None, :])
        weight_sum = weight_sum * decay + tl.sum(weights, 0)
        acc = acc * decay[None, :]
        acc = tl.dot(v, weights.to(v.dtype), acc, input_precision="ieee")
        highest = new_highest
    return highest, weight_sum, acc


@triton.jit
def add_tail(
    highest,
    weight_sum,
    acc,
    notes,
    dropped,
    pseudo_highest,
    count,
    h,
    kv_heads,
    means_ptr,
    G: tl.constexpr,
    D: tl.constexpr,
    CELLS: tl.constexpr,
    TILE_CELLS: tl.constexpr,
):
    """A running softmax with the mean values of `count` noted pages, weighted by the dropped mass of their cells, which
    is relative to a token of score `pseudo_highest [GROUP]`."""
    heads = tl.arange(0, acc.shape[1])
    channels = tl.arange(0, acc.shape[0])
    new_highest = tl.maximum(highest, pseudo_highest)
    decay = tl.exp2(highest - new_highest)
    factor = tl.exp2(pseudo_highest - new_highest)
    weight_sum = weight_sum * decay
    acc = acc * decay[None, :]
    # Most rows have one such tile, or few.
    for start in tl.range(0, count * CELLS, TILE_CELLS, num_stages=1):
        cell = start + tl.arange(0, TILE_CELLS)
        inside = cell < count * CELLS
        noted = tl.load(notes + cell // CELLS, mask=inside, other=0)
        closed = noted.to(tl.int32) >= plan.CLOSED
        places = ((noted >> 32) * kv_heads + h) * CELLS + cell % CELLS
        means = tl.load(
            means_ptr + places[None, :] * D + channels[:, None],
            mask=closed[None, :] & (channels < D)[:, None],
            other=0.0,
        )
        mass = tl.load(
            dropped + cell[:, None] * G + heads[None, :], mask=closed[:, None] & (heads < G)[None, :], other=0.0
        )
        weights = mass * factor[None, :]
        weight_sum += tl.sum(weights, 0)
        acc = tl.dot(means, weights.to(means.dtype), acc, input_precision="ieee")
    return new_highest, weight_sum, acc


@triton.jit
def fill_tap(
    kept_bits,
    first,
    count,
    kept,
    row_pages,
    tap_lists,
    tap_counts,
    CHUNK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Appends the kept blocks of the noted pages to the tap's list of this KV head, in any order."""
    BLOCKS: tl.constexpr = PAGE // BLOCK
    index = tl.arange(0, CHUNK)
    block = tl.arange(0, BLOCKS)
    bits = tl.load(kept_bits + index)
    page = plan.row_page(tl.minimum(first + index, first + count - 1), row_pages)
    flags = (bits[:, None] >> block[None, :]) & 1
    in_page = tl.sum(flags, 1)
    ranks = tl.cumsum(flags, 1) + (tl.cumsum(in_page, 0) - in_page)[:, None]
    place = tl.atomic_add(tap_counts, kept)
    tl.store(tap_lists + place + ranks - 1, page[:, None] * BLOCKS + block[None, :], mask=flags != 0)
