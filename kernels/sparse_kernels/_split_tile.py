"""Pieces of the kernel that attends to split keys: places of blocks, scores of a tile, a row's open page, softmax."""

import triton
import triton.language as tl

from . import _bfloat16_bits as bfloat16_bits
from .split_keys import ZERO

_ONES: tl.constexpr = tl.constexpr(0x6400)
"""The float16 of 1024, whose last place is 1: the ten bits below it count units."""

_OFFSET: tl.constexpr = tl.constexpr(1024.0 + ZERO)
_LARGEST_HALF: tl.constexpr = tl.constexpr(65504.0)


@triton.jit
def load_entries(list_ptr, positions, stop, HAS_LISTS: tl.constexpr):
    """Block of each place in a row's list; 0 from `stop` on."""
    if HAS_LISTS:
        return tl.load(list_ptr + positions, mask=positions < stop, other=0)
    return tl.where(positions < stop, positions, 0)


@triton.jit
def load_pages(page_row_ptr, blocks, positions, stop, closed_blocks, BLOCKS_PER_PAGE: tl.constexpr):
    """Physical page of each listed block of a closed page; -1 for others."""
    return tl.load(
        page_row_ptr + blocks // BLOCKS_PER_PAGE, mask=(positions < stop) & (blocks < closed_blocks), other=-1
    )


@triton.jit
def load_query(
    query_ptr,
    S: tl.constexpr,
    query_stride,
    factor,
    D: tl.constexpr,
    SUB: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Sub-range S of a row's queries times a factor, `[SUB, GROUP]` fp32, zeros beyond channels and heads."""
    columns = tl.arange(0, SUB)[:, None]
    heads = tl.arange(0, GROUP)[None, :]
    query = tl.load(
        query_ptr + heads * query_stride + (S * (D // 4) + columns), mask=(columns < D // 4) & (heads < G), other=0.0
    )
    return query.to(tl.float32) * factor


@triton.constexpr_function
def _join_asm(sub: int) -> str:
    """PTX that makes four float16 of residuals, the bytes of $2, and the codes of sub-range `sub`, in those of $3."""
    asm = f"shr.b32 t, $3, {2 * sub}; and.b32 t, t, 0x03030303; or.b32 t, t, 0x64646464; "
    return "{ .reg .b32 t; " + asm + "prmt.b32 $0, $2, t, 0x5140; prmt.b32 $1, $2, t, 0x7362; }"


@triton.jit
def _levels(packed, rest, S: tl.constexpr, ASM: tl.constexpr):
    """`256 * code + residual - 128` as float16, which holds it exactly; codes are those of sub-range S."""
    if ASM:
        JOIN: tl.constexpr = _join_asm(S)
        levels = tl.inline_asm_elementwise(JOIN, "=&r,=&r,r,r", [rest, packed], tl.float16, is_pure=True, pack=4)
    else:
        bits = ((packed.to(tl.int16) >> (2 * S)) & 3) << 8 | rest.to(tl.int16)
        levels = (bits | _ONES).to(tl.float16, bitcast=True)
    return levels - _OFFSET


@triton.jit
def add_products(
    scores,
    bias,
    packed,
    query,
    rests,
    bounds,
    present,
    S: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):
    """Adds sub-range S of the channels.

    Args:
        scores: `[blocks, BLOCK, GROUP]`, of what counts in units.
        bias: `[blocks, SUB, GROUP]`, of the lows; to be summed over the second dimension.
        packed: `[blocks, BLOCK, SUB]` uint8.
        query: `[SUB, GROUP]`.
        rests: `[blocks]`, where each block's residual begins.
        bounds: `[blocks]`, where each page's low begins; bit patterns.
        present: `[blocks]`; others count as 0.
    """
    BLOCK: tl.constexpr = packed.shape[1]
    SUB: tl.constexpr = packed.shape[2]
    BYTES: tl.constexpr = D // 4
    columns = tl.arange(0, SUB)
    inside = present[:, None] & (columns < BYTES)[None, :]
    at = tl.arange(0, BLOCK)[None, :, None] * D + (S * BYTES + columns)[None, None, :]
    rest = tl.load(rests[:, None, None] + at, mask=inside[:, None, :], other=0)
    bound = bounds[:, None] + (S * BYTES + columns)[None, :]
    low = bfloat16_bits.to_float(tl.load(bound, mask=inside, other=0))
    step = bfloat16_bits.to_float(tl.load(bound + D, mask=inside, other=0))
    levels = _levels(packed, rest, S, ASM)
    folded = query[None, :, :] * step[:, :, None]
    if HALF:
        # A query so large that its product with a step leaves float16's range is kept at its end.
        if ASM:
            folded = tl.inline_asm_elementwise(
                "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [folded], tl.float16, is_pure=True, pack=2
            )
        else:
            folded = tl.minimum(tl.maximum(folded, -_LARGEST_HALF), _LARGEST_HALF).to(tl.float16)
        scores = tl.dot(levels, folded, scores)
    else:
        scores = tl.dot(levels.to(tl.float32), folded, scores, input_precision="ieee")
    return scores, bias + query[None, :, :] * low[:, :, None]


@triton.jit
def add_tokens(highest, weight_sum, acc, scores, valid, v):
    """A running softmax with scores `[16, T]`, times log2(e), and values `[T, D]`."""
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # While nothing was valid the maximum is -inf: shift by 0 so that no -inf - -inf arises.
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    decay = tl.exp2(highest - shift)
    weights = tl.exp2(scores - shift[:, None])
    weight_sum = weight_sum * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_highest, weight_sum, acc


@triton.jit
def add_open_page(
    highest,
    weight_sum,
    acc,
    q,
    keys,
    key_stride,
    values,
    value_stride,
    list_ptr,
    blocks,
    closed_blocks,
    length,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    HAS_LISTS: tl.constexpr,
):
    """A running softmax with the listed blocks of an open page of `length` tokens, which are the last of the row's
    `blocks`; `keys` and `values` point to its first token."""
    channels = tl.arange(0, q.shape[1])
    first_place = tl.maximum(blocks - PAGE // BLOCK, 0)
    for start in tl.range(0, PAGE, TILE, num_stages=1):
        position = start + tl.arange(0, TILE)
        place = first_place + position // BLOCK
        inner = (load_entries(list_ptr, place, blocks, HAS_LISTS) - closed_blocks) * BLOCK + position % BLOCK
        valid = (place < blocks) & (inner >= 0) & (inner < length)
        inner = tl.where(valid, inner, 0)[:, None]
        mask = valid[:, None] & (channels < HEAD_DIM)[None, :]
        k = tl.load(keys + inner * key_stride + channels[None, :], mask=mask, other=0.0)
        v = tl.load(values + inner * value_stride + channels[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        highest, weight_sum, acc = add_tokens(highest, weight_sum, acc, scores, valid, v)
    return highest, weight_sum, acc
