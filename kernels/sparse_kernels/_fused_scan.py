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


@triton.constexpr_function
def _field_asm(sub: int) -> str:
    """PTX that leaves one of the eight codes of two bits in each of two words."""
    shift, field = (10, sub - 5) if sub > 4 else (0, sub)
    return f"{{ .reg .b32 t; shr.b32 t, $1, {shift}; and.b32 $0, t, 0x{0x00030003 << 2 * field:08x}; }}"


@triton.jit
def _field(words, S: tl.constexpr):
    """Sub-range S of words of eight codes of two bits: the subnormal float16 `2**-24 * factor * code`.

    Five fields fit the mantissa, with factors 1 to 256; the other three are shifted down first, with factors 1 to 16.
    """
    ASM: tl.constexpr = _field_asm(S)
    return tl.inline_asm_elementwise(ASM, "=r,r", [words], tl.float16, is_pure=True, pack=2)


@triton.jit
def _split_fields(folded):
    """The eight sub-ranges of `folded [8 * ROWS, GROUP]`, `[ROWS, GROUP]` each."""
    ROWS: tl.constexpr = folded.shape[0] // 8
    parts = tl.permute(tl.reshape(folded, (2, 2, 2, ROWS, folded.shape[1])), (3, 4, 0, 1, 2))
    even, odd = tl.split(parts)
    f04, f26 = tl.split(even)
    f15, f37 = tl.split(odd)
    f0, f4 = tl.split(f04)
    f1, f5 = tl.split(f15)
    f2, f6 = tl.split(f26)
    f3, f7 = tl.split(f37)
    return f0, f1, f2, f3, f4, f5, f6, f7


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

    The products are those of `_thumbnail_tile`; but codes of two bits are read as words of 16
    bits too, eight codes each, where that saves unpacking.

    Args:
        q: the row's queries.
        dropped: gets, for each cell, the sum over the tokens of its dropped blocks of `2**(score - highest)`; 0 for
            pages that are not closed.
        least, highest: `[GROUP]`, times log2(e): the score from which on a block is kept, and the finite one that
            masses are relative to.
    """
    WORDS: tl.constexpr = BITS != 3 and HALF
    SUBS: tl.constexpr = 8 if BITS == 2 and HALF else (2 if BITS == 4 and not HALF else 4)
    BYTES: tl.constexpr = D // SUBS
    UNIT: tl.constexpr = 16777216.0 if WORDS else 1.0
    # Row r of the folded query belongs to column r % SUB_ROWS of sub-range r // SUB_ROWS.
    rows = tl.arange(0, SUBS * SUB_ROWS)[:, None]
    if SUBS == 8:
        subs = rows // SUB_ROWS
        channels = subs % 4 * (D // 4) + 2 * (rows % SUB_ROWS) + subs // 4
        real = rows % SUB_ROWS < BYTES
        inverse_factor = tl.exp2(-2.0 * tl.where(subs > 4, subs - 5, subs).to(tl.float32))
    else:
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
        packed_rows = (noted >> 32) * kv_heads + h
        noted_bits = noted.to(tl.int32)
        closed = noted_bits >= plan.CLOSED
        if SUBS == 8:
            words = codes.to(tl.pointer_type(tl.int16)) + (packed_rows * PAGE + tokens) * (D // 8)
            packed = tl.load(words + columns, mask=(columns < BYTES) & closed, other=0)
        else:
            packed, high = thumbnail_tile.load_codes(codes, packed_rows, tokens, columns, closed, BITS, HALF, D, PAGE)
        # The bounds of the next page, in flight while this one is scored.
        noted = tl.load(notes + tl.minimum(index + 1, count - 1))
        summary = (noted >> 32) * kv_heads + h
        next_closed = noted.to(tl.int32) >= plan.CLOSED
        next_low, next_step = thumbnail_tile.load_bounds(low_step, summary, channels, real & next_closed, D)
        folded, bias = thumbnail_tile.fold(query, low, step, inverse_factor, WORDS, HALF)
        row_bias = tl.sum(bias, 0)
        if SUBS == 8:
            f0, f1, f2, f3, f4, f5, f6, f7 = _split_fields(folded)
            scores = tl.dot(_field(packed, 0), f0)
            scores = tl.dot(_field(packed, 1), f1, scores)
            scores = tl.dot(_field(packed, 2), f2, scores)
            scores = tl.dot(_field(packed, 3), f3, scores)
            scores = tl.dot(_field(packed, 4), f4, scores)
            scores = tl.dot(_field(packed, 5), f5, scores)
            scores = tl.dot(_field(packed, 6), f6, scores)
            scores = tl.dot(_field(packed, 7), f7, scores)
        else:
            f0, f1, f2, f3 = thumbnail_tile.split_subs(folded, SUBS)
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
