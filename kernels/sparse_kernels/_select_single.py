"""Which blocks a row keeps, for rows short enough for the registers of one program.

The search is that of `_threshold_search`: the smallest set of blocks whose weights reach a goal, by narrowing an
interval of the bit patterns of the shares. A row's time is that of its passes over the blocks and of their reductions,
so each pass tests four thresholds, interpolated where that helps, and heads share the reductions of their softmax.
"""

import torch
import triton
import triton.language as tl

from . import _score_tile as score_tile
from ._dispatch import INTERPRETED
from ._selection import MASS_BITS

_INTERPRETED = tl.constexpr(INTERPRETED)
_MASS_UNIT = tl.constexpr(float(2**MASS_BITS))
_LOG2_E = score_tile.LOG2_E
_FORCED = tl.constexpr(0x7FFFFFFF)
_TWO = tl.constexpr(0x40000000)
"""The bit pattern of 2.0, above that of any share."""


@triton.jit
def _add_quads(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _max_quads(a0, a1, a2, a3, b0, b1, b2, b3):
    return tl.maximum(a0, b0), tl.maximum(a1, b1), tl.maximum(a2, b2), tl.maximum(a3, b3)


@triton.jit
def sum4(x0, x1, x2, x3):
    """Sums of four tensors. The interpreter reduces tuples element by element."""
    if _INTERPRETED:
        return tl.sum(x0, 0), tl.sum(x1, 0), tl.sum(x2, 0), tl.sum(x3, 0)
    else:
        return tl.reduce((x0, x1, x2, x3), 0, _add_quads)


@triton.jit
def max4(x0, x1, x2, x3):
    if _INTERPRETED:
        return tl.max(x0, 0), tl.max(x1, 0), tl.max(x2, 0), tl.max(x3, 0)
    else:
        return tl.reduce((x0, x1, x2, x3), 0, _max_quads)


def rows_are_aligned(log_mass: torch.Tensor, kept_mask: torch.Tensor | None) -> bool:
    """Whether rows have room for a multiple of 16 blocks and begin at one: ALIGNED of the functions below."""
    strides = log_mass.stride()[:3] + (() if kept_mask is None else kept_mask.stride()[:2])
    return all(stride % 16 == 0 for stride in (log_mass.shape[3], *strides))


@triton.jit
def vector_bound(blocks_in_row, ALIGNED: tl.constexpr):
    """The row's length for masks: a multiple of 16 where rows have room for it, which lets vector accesses through."""
    if ALIGNED:
        return tl.multiple_of((blocks_in_row + 15) // 16 * 16, 16)
    else:
        return blocks_in_row


@triton.jit
def _load(log_mass, group_stride, head, blocks, blocks_in_row, G: tl.constexpr, ALIGNED: tl.constexpr):
    """Log masses of a head's blocks, -inf beyond the row, and for heads beyond the group."""
    mask = (blocks < vector_bound(blocks_in_row, ALIGNED)) & (head < G)
    row = tl.load(log_mass + head * group_stride + blocks, mask=mask, other=float("-inf"))
    return tl.where(blocks < blocks_in_row, row, float("-inf")) if ALIGNED else row


@triton.jit
def relative_mass(row, highest):
    """`exp(row - highest)`; a row without any mass is not shifted.

    The multiplication is a fused one by name: the compiler may do this twice, in two layouts, and where it is free to
    fuse it does not always do so alike. Equal shares would then differ by where they are looked at.
    """
    shift = tl.where(highest == float("-inf"), 0.0, highest * -_LOG2_E)
    return score_tile.exp2(tl.fma(row, _LOG2_E, shift))


@triton.jit
def _factor(total, head, G: tl.constexpr):
    """What turns masses into parts of the group's mean share; and whether the head has shares at all."""
    present = head < G
    return tl.where(present, 1.0 / (total * G), 0.0), (total > 0) | (not present)


@triton.jit
def mean_shares(
    log_mass, group_stride, blocks, blocks_in_row, G: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr
):
    """Mean share of each block over the group's heads, `[CHUNK]`; False where some head has no shares, because there is
    NaN or +inf, or nothing but -inf. The shares are zeros then."""
    shares = tl.zeros((CHUNK,), tl.float32)
    valid = tl.full((), 1, tl.int1)
    if G == 1 or CHUNK > 8192:
        # Registers do not hold four heads of a longer row.
        for head in range(G):
            row = _load(log_mass, group_stride, head, blocks, blocks_in_row, G, ALIGNED)
            mass = relative_mass(row, tl.max(row, 0))
            factor, has_shares = _factor(tl.sum(mass, 0), head, G)
            shares += mass * factor
            valid = valid & has_shares
    else:
        for head in tl.static_range(0, G, 4):
            row0 = _load(log_mass, group_stride, head, blocks, blocks_in_row, G, ALIGNED)
            row1 = _load(log_mass, group_stride, head + 1, blocks, blocks_in_row, G, ALIGNED)
            row2 = _load(log_mass, group_stride, head + 2, blocks, blocks_in_row, G, ALIGNED)
            row3 = _load(log_mass, group_stride, head + 3, blocks, blocks_in_row, G, ALIGNED)
            max0, max1, max2, max3 = max4(row0, row1, row2, row3)
            row0 = relative_mass(row0, max0)
            row1 = relative_mass(row1, max1)
            row2 = relative_mass(row2, max2)
            row3 = relative_mass(row3, max3)
            sum0, sum1, sum2, sum3 = sum4(row0, row1, row2, row3)
            factor0, valid0 = _factor(sum0, head, G)
            factor1, valid1 = _factor(sum1, head + 1, G)
            factor2, valid2 = _factor(sum2, head + 2, G)
            factor3, valid3 = _factor(sum3, head + 3, G)
            shares += row0 * factor0 + row1 * factor1 + (row2 * factor2 + row3 * factor3)
            valid = valid & valid0 & valid1 & valid2 & valid3
    return tl.where(valid, shares, 0.0), valid


@triton.jit
def weight(key, BY_COUNT: tl.constexpr):
    """What a block of this key counts for: its share in units of `2**-MASS_BITS`, or 1; never less for a larger key."""
    if BY_COUNT:
        return key * 0 + 1
    else:
        return (key.to(tl.float32, bitcast=True) * _MASS_UNIT + 0.5).to(tl.int32)


@triton.jit
def _reached(keys, weights, t0, t1, t2, t3):
    """Sums of the weights of keys at or above each of four thresholds."""
    return sum4(
        tl.where(keys >= t0, weights, 0),
        tl.where(keys >= t1, weights, 0),
        tl.where(keys >= t2, weights, 0),
        tl.where(keys >= t3, weights, 0),
    )


@triton.jit
def _four_between(low, high, low_sum, high_sum, count, goal):
    """Four thresholds inside `(low, high)`, in ascending order, two on each side of where the goal should be.

    Over more than an octave they are the bracket's fifths. In less, shares are spread about evenly, and the goal's
    place follows from the sums at both ends, off by about the square root of the number of blocks. A simulation on
    random rows chose the distances.
    """
    span = (high - low).to(tl.float32)
    wide = high - low > (1 << 23)
    place = (low_sum - goal).to(tl.float32) / tl.maximum(low_sum - high_sum, 1).to(tl.float32)
    place = tl.where(wide, 0.5, place)
    spread = 1.0 / tl.sqrt(tl.maximum(count, 1.0))
    near = tl.where(wide, 0.1, 0.2 * spread)
    far = tl.where(wide, 0.3, 0.75 * spread)
    t0 = low + (span * tl.maximum(place - far, 0.0)).to(tl.int32)
    t1 = low + (span * tl.maximum(place - near, 0.0)).to(tl.int32)
    t2 = low + (span * tl.minimum(place + near, 1.0)).to(tl.int32)
    t3 = low + (span * tl.minimum(place + far, 1.0)).to(tl.int32)
    t0 = tl.minimum(tl.maximum(t0, low + 1), high - 1)
    t1 = tl.minimum(tl.maximum(t1, t0), high - 1)
    t2 = tl.minimum(tl.maximum(t2, t1), high - 1)
    return t0, t1, t2, tl.minimum(tl.maximum(t3, t2), high - 1)


@triton.jit
def smallest_set(shares, blocks, blocks_in_row, sink, tail, valid, goal, guess, BY_COUNT: tl.constexpr):
    """The blocks that a row keeps, `[CHUNK]`: the forced ones, and of the free ones, `[sink, tail)`, the fewest of
    largest share, the lower index first among equals, with which the weights reach `goal`; all if they do not, and
    where shares are not `valid`.

    `guess` is the first threshold to test; a good one saves steps.
    """
    # Forced blocks count as larger than any share.
    inside = blocks < blocks_in_row
    keys = tl.where((blocks >= sink) & (blocks < tail), shares.to(tl.int32, bitcast=True), _FORCED)
    keys = tl.where(inside, keys, -1)
    weights = tl.where(inside, weight(shares.to(tl.int32, bitcast=True), BY_COUNT), 0)
    low = tl.zeros((), tl.int32)
    high = tl.full((), _TWO, tl.int32)
    # The second guess is eight mean shares.
    t1 = tl.minimum(tl.maximum(guess, low + 1), high - 1)
    t2 = tl.minimum(tl.maximum((8.0 / blocks_in_row.to(tl.float32)).to(tl.int32, bitcast=True), t1), high - 1)
    low_sum, sum1, sum2, high_sum = _reached(keys, weights, low, t1, t2, high)
    searching = (high_sum < goal) & (low_sum >= goal) & valid
    # Forced blocks alone may do; where nothing does, `low` is 0 and keeps all.
    low = tl.where((high_sum >= goal) & valid, high, low)
    each = tl.zeros((), tl.int32)
    if searching:
        if sum2 >= goal:
            low, low_sum = t2, sum2
        elif sum1 >= goal:
            low, low_sum, high, high_sum = t1, sum1, t2, sum2
        else:
            high, high_sum = t1, sum1
        each = weight(low, BY_COUNT)
    # Invariant while searching: the weights from `low` reach the goal, those from `high` do not. Every block from `low`
    # on weighs at least `each`: it is over where the goal needs the least of them, and where one block is between.
    while searching & (high - low > 1) & (low_sum - goal >= each) & ((low_sum - high_sum) // 2 >= each):
        count = (low_sum - high_sum).to(tl.float32) / tl.maximum(each, 1).to(tl.float32)
        t0, t1, t2, t3 = _four_between(low, high, low_sum, high_sum, count, goal)
        sum0, sum1, sum2, sum3 = _reached(keys, weights, t0, t1, t2, t3)
        if sum3 >= goal:
            low, low_sum = t3, sum3
        elif sum2 >= goal:
            low, low_sum, high, high_sum = t2, sum2, t3, sum3
        elif sum1 >= goal:
            low, low_sum, high, high_sum = t1, sum1, t2, sum2
        elif sum0 >= goal:
            low, low_sum, high, high_sum = t0, sum0, t1, sum1
        else:
            high, high_sum = t0, sum0
        each = weight(low, BY_COUNT)
    kept = (keys >= low) & inside
    if searching & (low_sum - goal >= each) & ((low_sum - high_sum) // 2 >= each):
        # The keys in [low, high) are equal, and more than it takes.
        ties = (goal - high_sum + each - 1) // tl.maximum(each, 1)
        tied = kept & (keys < high)
        kept = (kept & (keys >= high)) | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= ties))
    return kept


@triton.jit
def _list_flags(lists, flags, blocks_in_row, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """Writes the list of the blocks whose flag, a byte, is not 0; returns their number."""
    RUN: tl.constexpr = 16
    runs = tl.arange(0, CHUNK // RUN)
    blocks = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
    kept = tl.load(flags + blocks, mask=blocks < vector_bound(blocks_in_row, ALIGNED), other=0).to(tl.int32)
    kept = tl.where(blocks < blocks_in_row, kept, 0)
    in_run = tl.sum(kept, 1)
    up_to_run = tl.cumsum(in_run, 0)
    ranks = tl.cumsum(kept, 1) + (up_to_run - in_run)[:, None]
    tl.store(lists + ranks - 1, blocks, mask=kept != 0)
    return tl.sum(in_run, 0)


@triton.jit
def select_single(
    log_mass,
    group_stride,
    goal,
    guess,
    blocks_in_row,
    sink,
    tail,
    lists,
    flags,
    G: tl.constexpr,
    EVERY: tl.constexpr,
    BY_COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Writes the list and the flags, a byte a block, of a row of at most CHUNK blocks, and returns the list's length.
    The free blocks are `[sink, tail)`."""
    blocks = tl.arange(0, CHUNK)
    if EVERY:
        kept = (blocks < blocks_in_row) & ((blocks < sink) | (blocks >= tail))
        for head in range(G):
            row = log_mass + head * group_stride
            shares, valid = mean_shares(row, group_stride, blocks, blocks_in_row, 1, CHUNK, ALIGNED)
            kept = kept | smallest_set(shares, blocks, blocks_in_row, sink, tail, valid, goal, guess, BY_COUNT)
    else:
        shares, valid = mean_shares(log_mass, group_stride, blocks, blocks_in_row, G, CHUNK, ALIGNED)
        kept = smallest_set(shares, blocks, blocks_in_row, sink, tail, valid, goal, guess, BY_COUNT)
    tl.store(flags + blocks, kept.to(tl.uint8), mask=blocks < vector_bound(blocks_in_row, ALIGNED))
    # The list's ranks are counted over flags read back as bytes: a thread then holds a run of blocks, which makes the
    # prefix sum several times as fast.
    tl.debug_barrier()
    return _list_flags(lists, flags, blocks_in_row, CHUNK, ALIGNED)
