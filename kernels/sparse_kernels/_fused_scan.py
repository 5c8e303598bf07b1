"""What a program of `fused_top_delta` does before it attends: notes its pages, scans them, lists the blocks to keep.

Notes go through global memory that only this program touches, a few KiB that stay in the caches: the loops that load
pages then depend on nothing but loads.
"""

import triton
import triton.language as tl

from . import _bfloat16_bits as bfloat16_bits
from . import _fused_plan as plan
from . import _score_tile as score_tile
from ._dispatch import INTERPRETED
from .block_mass_thumbnail import _high_plane, _levels

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def note_pages(
    notes,
    pages,
    first,
    count,
    length,
    sink,
    tail,
    keeps_all,
    CHUNK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Notes the pages of `count` units from `first` on: physical page, forced blocks and whether it is closed, and the
    forced blocks once more as those to keep. `keeps_all` forces all, and leaves no page to scan."""
    BLOCKS: tl.constexpr = PAGE // BLOCK
    index = tl.arange(0, CHUNK)
    inside = index < count
    page = plan.row_page(tl.minimum(first + index, first + count - 1), tl.cdiv(length, PAGE))
    physical = tl.load(pages + page, mask=inside, other=0)
    # Blocks of the page that are sinks, that come before the window, and that exist.
    sinks = tl.minimum(tl.maximum(sink - page * BLOCKS, 0), BLOCKS)
    free = tl.minimum(tl.maximum(tail - page * BLOCKS, 0), BLOCKS)
    present = (1 << tl.minimum(tl.cdiv(length, BLOCK) - page * BLOCKS, BLOCKS)) - 1
    forced = (((1 << sinks) - 1) | (-1 << free)) & present
    forced = tl.where(inside, tl.where(keeps_all, present, forced), 0)
    closed = inside & (page < length // PAGE) & (not keeps_all)
    tl.store(notes + index, physical)
    tl.store(notes + CHUNK + index, tl.where(closed, forced | plan.CLOSED, forced))
    tl.store(notes + 2 * CHUNK + index, forced)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _kept_bits(passed, PAGES: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Bit j of a page: whether a token of its block j passed for any head. `passed` is `[PAGES, PAGE, GROUP]`."""
    GROUP: tl.constexpr = passed.shape[2]
    bits = passed.to(tl.int32) << (tl.arange(0, PAGE) // BLOCK)[None, :, None]
    if _INTERPRETED:
        by_block = tl.max(tl.reshape(bits, (PAGES, PAGE // BLOCK, BLOCK * GROUP)), 2)
        return tl.sum(by_block, 1)
    else:
        return tl.reduce(tl.reshape(bits, (PAGES, PAGE * GROUP)), 1, _or)


@triton.jit
def _channels(sub, rows, D: tl.constexpr, SUBS: tl.constexpr, WORDS: tl.constexpr):
    """The channels whose codes sub-range `sub` holds in column `rows`."""
    if WORDS:
        return sub % 2 * (D // 2) + 2 * rows + sub // 2
    else:
        return sub * (D // SUBS) + rows


@triton.jit
def _bounds(low_step, summary, sub, rows, real, D: tl.constexpr, SUBS: tl.constexpr, WORDS: tl.constexpr):
    """Low and step of the channels of sub-range `sub`, `[PAGES, ROWS]` fp32."""
    bounds = low_step + summary * (2 * D) + _channels(sub, rows, D, SUBS, WORDS)
    low = tl.load(bounds, mask=real, other=0)
    step = tl.load(bounds + D, mask=real, other=0)
    return bfloat16_bits.to_float(low), bfloat16_bits.to_float(step)


@triton.jit
def _fold(query, low, step, inverse_factor, HALF: tl.constexpr, WORDS: tl.constexpr):
    """A sub-range of the query with the step folded in, in the type of the levels, and its products with low:
    `[PAGES, ROWS, GROUP]` both."""
    bias = query * low[:, :, None]
    folded = query * (step * inverse_factor)[:, :, None]
    if WORDS:
        # A query so large that its product with a step leaves float16's range is kept at its end.
        folded = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [folded], tl.float16, is_pure=True, pack=2
        )
    elif HALF:
        # Codes go into the product as 128 + code (see `_levels`): 128 times the rounded query is too much.
        folded, rounded = bfloat16_bits.round_half_up(folded)
        bias -= 128.0 * rounded
    return folded, bias


@triton.jit
def _query(
    q,
    sub,
    rows,
    heads,
    head_stride,
    scale_log2,
    D: tl.constexpr,
    G: tl.constexpr,
    SUBS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The row's queries in the channels of a sub-range, `[1, ROWS, GROUP]` fp32, scaled."""
    channels = _channels(sub, rows, D, SUBS, WORDS)
    pointers = q + heads[None, None, :] * head_stride + channels[None, :, None]
    real = (rows < D // SUBS)[None, :, None] & (heads < G)[None, None, :]
    return tl.load(pointers, mask=real, other=0.0).to(tl.float32) * scale_log2


@triton.jit
def scan_pages(
    q,
    q_head_stride,
    codes,
    low_step,
    notes,
    dropped,
    count,
    h,
    kv_heads,
    least,
    highest,
    scale_log2,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SUB_ROWS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CELLS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scans the closed ones of `count` noted pages: notes the blocks to keep, and with CELLS the mass of the others.

    Args:
        q: the row's queries.
        dropped: gets, for each cell, the sum over the tokens of its dropped blocks of `2**(score - highest)`; 0 for
            pages that are not closed.
        least, highest: `[GROUP]`, times log2(e): the score from which on a block is kept, and the finite one that
            masses are relative to.
    """
    WORDS: tl.constexpr = BITS == 4 and HALF
    SUBS: tl.constexpr = 2 if BITS == 4 and not HALF else 4
    BYTES: tl.constexpr = D // SUBS
    UNIT: tl.constexpr = 16777216.0 if WORDS else 1.0
    # What `_levels` multiplies the codes of a sub-range with, inverted.
    INVERSE_1: tl.constexpr = 0.0625 if WORDS else (0.125 if BITS == 4 else 0.25)
    INVERSE_2: tl.constexpr = 1.0 if WORDS else 0.0625
    INVERSE_3: tl.constexpr = 0.0625
    rows = tl.arange(0, SUB_ROWS)
    heads = tl.arange(0, GROUP)
    tokens = tl.arange(0, PAGE)
    pages = tl.arange(0, PAGES)
    q0 = _query(q, 0, rows, heads, q_head_stride, scale_log2, D, G, SUBS, WORDS)
    q1 = _query(q, 1, rows, heads, q_head_stride, scale_log2, D, G, SUBS, WORDS)
    q2 = q0
    q3 = q1
    if SUBS == 4:
        q2 = _query(q, 2, rows, heads, q_head_stride, scale_log2, D, G, SUBS, WORDS)
        q3 = _query(q, 3, rows, heads, q_head_stride, scale_log2, D, G, SUBS, WORDS)
    for start in tl.range(0, count, PAGES, num_stages=STAGES):
        # Notes reach to a multiple of PAGES: CHUNK is one.
        noted = tl.load(notes + CHUNK + start + pages)
        closed = noted >= plan.CLOSED
        summary = tl.load(notes + start + pages).to(tl.int64) * kv_heads + h
        if WORDS:
            packed_rows = codes.to(tl.pointer_type(tl.int16)) + summary[:, None, None] * (PAGE * D // 4)
            packed_rows += tokens[None, :, None] * (D // 4)
        else:
            packed_rows = codes + summary[:, None, None] * (PAGE * D * BITS // 8)
            packed_rows += tokens[None, :, None] * (D * BITS // 8)
        real = closed[:, None, None] & (rows < BYTES)[None, None, :]
        packed = tl.load(packed_rows + rows[None, None, :], mask=real, other=0)
        high = packed
        if BITS == 3:
            high = tl.load(packed_rows + BYTES + rows[None, None, :] % (BYTES // 2), mask=real, other=0)
            high = _high_plane(high, rows[None, None, :], BYTES, HALF)
        column = rows[None, :]
        in_sub = closed[:, None] & (column < BYTES)
        low, step = _bounds(low_step, summary[:, None], 0, column, in_sub, D, SUBS, WORDS)
        f0, bias = _fold(q0, low, step, 1.0, HALF, WORDS)
        low, step = _bounds(low_step, summary[:, None], 1, column, in_sub, D, SUBS, WORDS)
        f1, more = _fold(q1, low, step, INVERSE_1, HALF, WORDS)
        bias += more
        scores = tl.dot(_levels(packed, high, 0, BITS, HALF), f0, input_precision="ieee")
        scores = tl.dot(_levels(packed, high, 1, BITS, HALF), f1, scores, input_precision="ieee")
        if SUBS == 4:
            low, step = _bounds(low_step, summary[:, None], 2, column, in_sub, D, SUBS, WORDS)
            f2, more = _fold(q2, low, step, INVERSE_2, HALF, WORDS)
            bias += more
            low, step = _bounds(low_step, summary[:, None], 3, column, in_sub, D, SUBS, WORDS)
            f3, more = _fold(q3, low, step, INVERSE_3, HALF, WORDS)
            bias += more
            scores = tl.dot(_levels(packed, high, 2, BITS, HALF), f2, scores, input_precision="ieee")
            scores = tl.dot(_levels(packed, high, 3, BITS, HALF), f3, scores, input_precision="ieee")
        row_bias = tl.sum(bias, 1)
        # Products are compared as they are: score = product * UNIT + bias.
        limit = (least[None, :] - row_bias) * (1.0 / UNIT)
        passed = (scores >= limit[:, None, :]) | (limit != limit)[:, None, :] | (scores != scores)
        passed = passed & (heads < G)[None, None, :]
        bits = tl.where(closed, _kept_bits(passed, PAGES, PAGE, BLOCK), 0) | (noted & (plan.CLOSED - 1))
        tl.store(notes + 2 * CHUNK + start + pages, bits)
        if CELLS:
            is_kept = (bits[:, None] >> (tokens // BLOCK)[None, :]) & 1
            mass = score_tile.exp2(scores * UNIT + (row_bias - highest[None, :])[:, None, :])
            mass = tl.where((is_kept == 0)[:, :, None] & closed[:, None, None], mass, 0.0)
            mass = tl.sum(tl.reshape(mass, (PAGES, CELLS, PAGE // CELLS, GROUP)), 2)
            cell = (start + pages)[:, None] * CELLS + tl.arange(0, CELLS)[None, :]
            places = dropped + cell[:, :, None] * G + heads[None, None, :]
            tl.store(places, mass, mask=tl.broadcast_to((heads < G)[None, None, :], mass.shape))


@triton.jit
def list_blocks(notes, slots, CHUNK: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Lists the first slots of the blocks that are to be kept of the noted pages; returns their number."""
    BLOCKS: tl.constexpr = PAGE // BLOCK
    index = tl.arange(0, CHUNK)
    block = tl.arange(0, BLOCKS)
    bits = tl.load(notes + 2 * CHUNK + index)
    physical = tl.load(notes + index)
    kept = (bits[:, None] >> block[None, :]) & 1
    in_page = tl.sum(kept, 1)
    up_to_page = tl.cumsum(in_page, 0)
    ranks = tl.cumsum(kept, 1) + (up_to_page - in_page)[:, None]
    tl.store(slots + ranks - 1, physical[:, None] * PAGE + block[None, :] * BLOCK, mask=kept != 0)
    return tl.sum(in_page, 0)
