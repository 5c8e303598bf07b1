"""What a program of `fused_top_delta` does before it attends: notes its pages, scans them, lists the blocks to keep.

Notes go through global memory that only this program touches, a few KiB that stay in the caches: the loops that load
pages then depend on nothing but loads.
"""

import triton
import triton.language as tl

from . import _fused_plan as plan
from . import _score_tile as score_tile
from . import _thumbnail_tile as thumbnail_tile
from ._dispatch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def note_pages(
    notes,
    kept_bits,
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
    """Notes the pages of `count` units from `first` on: whether they are to be scanned, their forced blocks, and in the
    upper half the physical pages. Forced blocks are kept. `keeps_all` forces all, and leaves no page to scan."""
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
    noted = tl.where(closed, forced | plan.CLOSED, forced)
    tl.store(notes + index, (physical.to(tl.int64) << 32) | noted.to(tl.int64))
    tl.store(kept_bits + index, forced)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _kept_bits(failed, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Bit j: whether a token of the page's block j did not fail for some head. `failed` is `[PAGE, GROUP]`."""
    bits = tl.where(failed, 0, (1 << (tl.arange(0, PAGE) // BLOCK))[:, None])
    if _INTERPRETED:
        by_block = tl.max(tl.reshape(bits, (PAGE // BLOCK, BLOCK * failed.shape[1])), 1)
        return tl.sum(by_block, 0)
    else:
        return tl.reduce(tl.reshape(bits, (PAGE * failed.shape[1],)), 0, _or)


@triton.jit
def scan_pages(
    q,
    q_head_stride,
    codes,
    low_step,
    notes,
    kept_bits,
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
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CELLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scans the closed ones of `count` noted pages: notes the blocks to keep, and with CELLS the mass of the others.

    The products are those of `_thumbnail_tile`.

    Args:
        q: the row's queries.
        dropped: gets, for each cell, the sum over the tokens of its dropped blocks of `2**(score - highest)`; 0 for
            pages that are not closed.
        least, highest: `[GROUP]`, times log2(e): the score from which on a block is kept, and the finite one that
            masses are relative to.
    """
    WORDS: tl.constexpr = BITS == 4 and HALF
    SUBS: tl.constexpr = 2 if BITS == 4 and not HALF else 4
    UNIT: tl.constexpr = 16777216.0 if WORDS else 1.0
    rows = tl.arange(0, SUBS * SUB_ROWS)[:, None]
    channels, real, inverse_factor = thumbnail_tile.channels_of(rows, D, SUB_ROWS, BITS, HALF)
    heads = tl.arange(0, GROUP)
    tokens = tl.arange(0, PAGE)[:, None]
    columns = tl.arange(0, SUB_ROWS)[None, :]
    pointers = tl.max_contiguous(q + heads[None, :] * q_head_stride + channels, [1, 1])
    query = tl.load(pointers, mask=real & (heads < G)[None, :], other=0.0).to(tl.float32) * scale_log2
    # Pages without a summary are not read.
    noted = tl.load(notes)
    summary = (noted >> 32) * kv_heads + h
    closed = noted.to(tl.int32) >= plan.CLOSED
    low, step = thumbnail_tile.load_bounds(low_step, summary, channels, real & closed, D)
    for index in tl.range(0, count, num_stages=STAGES):
        noted = tl.load(notes + index)
        summary = (noted >> 32) * kv_heads + h
        noted_bits = noted.to(tl.int32)
        closed = noted_bits >= plan.CLOSED
        packed, high = thumbnail_tile.load_codes(codes, summary, tokens, columns, closed, BITS, HALF, D, PAGE)
        # The bounds of the next page, in flight while this one is scored.
        noted = tl.load(notes + tl.minimum(index + 1, count - 1))
        summary = (noted >> 32) * kv_heads + h
        next_closed = noted.to(tl.int32) >= plan.CLOSED
        next_low, next_step = thumbnail_tile.load_bounds(low_step, summary, channels, real & next_closed, D)
        folded, bias = thumbnail_tile.fold(query, low, step, inverse_factor, BITS, HALF)
        f0, f1, f2, f3 = thumbnail_tile.split_subs(folded, SUBS)
        row_bias = tl.sum(bias, 0)
        scores = tl.zeros((PAGE, GROUP), tl.float32)
        scores = thumbnail_tile.score(packed, high, f0, f1, f2, f3, scores, BITS, HALF)
        # Products are compared as they are: score = product * UNIT + bias. What is no number does not fail.
        failed = scores < ((least - row_bias) * (1.0 / UNIT))[None, :]
        if G < GROUP:
            failed = failed | (heads >= G)[None, :]
        bits = tl.where(closed, _kept_bits(failed, PAGE, BLOCK), 0) | (noted_bits & (plan.CLOSED - 1))
        tl.store(kept_bits + index, bits)
        if CELLS:
            is_dropped = (((bits >> (tokens // BLOCK)) & 1) == 0) & closed
            mass = score_tile.exp2(scores * UNIT + (row_bias - highest)[None, :])
            mass = tl.where(is_dropped, mass, 0.0)
            mass = tl.sum(tl.reshape(mass, (CELLS, PAGE // CELLS, GROUP)), 1)
            places = dropped + (index * CELLS + tl.arange(0, CELLS)[:, None]) * G + heads[None, :]
            tl.store(places, mass, mask=tl.broadcast_to((heads < G)[None, :], mass.shape))
        low, step = next_low, next_step


@triton.jit
def list_blocks(notes, kept_bits, slots, CHUNK: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Lists the first slots of the blocks that are to be kept of the noted pages; returns their number."""
    BLOCKS: tl.constexpr = PAGE // BLOCK
    index = tl.arange(0, CHUNK)
    block = tl.arange(0, BLOCKS)
    bits = tl.load(kept_bits + index)
    physical = (tl.load(notes + index) >> 32).to(tl.int32)
    kept = (bits[:, None] >> block[None, :]) & 1
    in_page = tl.sum(kept, 1)
    up_to_page = tl.cumsum(in_page, 0)
    ranks = tl.cumsum(kept, 1) + (up_to_page - in_page)[:, None]
    tl.store(slots + ranks - 1, physical[:, None] * PAGE + block[None, :] * BLOCK, mask=kept != 0)
    return tl.sum(in_page, 0)
