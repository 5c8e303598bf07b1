"""Pieces of the block-mass kernels: query tiles, block log-sum-exp, and exact scores of a page's tokens."""

import torch
import triton
import triton.language as tl

from ._dispatch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
REQUESTS = 64
"""Requests that a program looks at in one step when it searches its share."""


def padded_group(group_size: int) -> int:
    """Columns of a query tile: a power of two that the tensor cores take."""
    return max(4, triton.next_power_of_2(group_size))


def token_tile(page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of a key tile: at most a page, and at most 32 KiB of keys."""
    return min(page_size, 64, 32768 // (triton.next_power_of_2(head_dim) * dtype.itemsize))


@triton.jit
def load_query(
    q, batch_stride, head_stride, b, h, D: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr
):
    """A row's queries, `[ROWS, GROUP]`, zeros beyond D and G."""
    channels = tl.arange(0, ROWS)[:, None]
    heads = tl.arange(0, GROUP)[None, :]
    pointers = q + b.to(tl.int64) * batch_stride + (h * G + heads) * head_stride + channels
    return tl.load(pointers, mask=(channels < D) & (heads < G), other=0.0)


@triton.jit
def exp2(x):
    """`2**x`; natively without the several instructions that keep subnormal results, which are no mass to speak of."""
    if _INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def log2(x):
    """`log2(x)` for `x` that is not subnormal."""
    if _INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def block_log_mass(scores, BLOCK: tl.constexpr):
    """Log-sum-exp over blocks of tokens: scores in nats times log2(e), `[T, GROUP]`, to nats, `[T // BLOCK, GROUP]`."""
    # One shift for the whole tile: a block more than 126 (log2) below its largest score gets -inf, whose share of the
    # mass is 0, as it would be in fp32.
    highest = tl.max(scores, 0)[None, :]
    tiles = tl.reshape(exp2(scores - highest), (scores.shape[0] // BLOCK, BLOCK, scores.shape[1]))
    return (highest + log2(tl.sum(tiles, 1))) * LN_2


@triton.jit
def block_maximum(scores, BLOCK: tl.constexpr):
    """Largest score of blocks of tokens: nats times log2(e), `[T, GROUP]`, to nats, `[T // BLOCK, GROUP]`; +inf for a
    block with a score that is no number."""
    scores = tl.where(scores == scores, scores, float("inf"))
    tiles = tl.reshape(scores, (scores.shape[0] // BLOCK, BLOCK, scores.shape[1]))
    return tl.max(tiles, 1) * LN_2


@triton.jit
def store_blocks(out_row, group_stride, mass, first_block, end_block, G: tl.constexpr):
    """Stores `mass [blocks, GROUP]` at blocks from `first_block` on, those below `end_block` only."""
    blocks = first_block + tl.arange(0, mass.shape[0])[:, None]
    heads = tl.arange(0, mass.shape[1])[None, :]
    tl.store(out_row + heads * group_stride + blocks, mass, mask=(heads < G) & (blocks < end_block))


@triton.jit
def exact_tile(query, keys, slot_stride, slot, count, scale_log2, T: tl.constexpr, D: tl.constexpr):
    """Scores times log2(e), `[T, GROUP]`, of `count` tokens from `slot` on; -inf beyond. `query` is `[ROWS, GROUP]`."""
    tokens = tl.arange(0, T)[:, None]
    channels = tl.arange(0, query.shape[0])[None, :]
    # Tokens beyond the sequence may hold anything, NaN included; theirs is a row each, which gets -inf below.
    tile = tl.load(keys + (slot + tokens) * slot_stride + channels, mask=(tokens < count) & (channels < D), other=0.0)
    scores = tl.dot(tile, query, input_precision="ieee") * scale_log2
    return tl.where(tokens < count, scores, float("-inf"))


@triton.jit
def write_open_page(
    query,
    keys,
    slot_stride,
    pages,
    length,
    out_row,
    group_stride,
    scale_log2,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
    max_row=None,
):
    """Writes the exact log mass of the blocks of a row's open page; to `max_row`, unless None, their largest scores."""
    closed = length // PAGE
    slot = tl.load(pages + closed).to(tl.int64) * PAGE
    for start in range(0, length % PAGE, T):
        scores = exact_tile(query, keys, slot_stride, slot + start, length % PAGE - start, scale_log2, T, D)
        first_block = closed * (PAGE // BLOCK) + start // BLOCK
        store_blocks(out_row, group_stride, block_log_mass(scores, BLOCK), first_block, tl.cdiv(length, BLOCK), G)
        if max_row is not None:
            store_blocks(max_row, group_stride, block_maximum(scores, BLOCK), first_block, tl.cdiv(length, BLOCK), G)
