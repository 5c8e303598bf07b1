"""What a row of blocks keeps, found by the K programs of a cluster, each of which holds a segment of N blocks.

What does not belong to a segment, such as a bracket of thresholds, is the same in all programs of a cluster: it comes
from what they exchanged. So they take the same turns.
"""

import triton
import triton.language as tl

from . import _score_tile as score_tile
from ._cluster_exchange import exchange, exchange_pairs
from ._dispatch import INTERPRETED
from ._select_single import max4, relative_mass, sum4, weight

_INTERPRETED = tl.constexpr(INTERPRETED)
_LOG2_E = score_tile.LOG2_E
_FORCED = tl.constexpr(0x7FFFFFFF)
_TWO = tl.constexpr(0x40000000)
"""The bit pattern of 2.0, above that of any share."""

_COUNT_SHIFT = tl.constexpr(31)
_SUM_MASK = tl.constexpr(0x7FFFFFFF)
"""A word of an exchange has a sum of weights, which is at most 1 and rounding in units of 2**-30, below its count."""


@triton.jit
def load_four(log_mass, group_stride, head, blocks, room, G: tl.constexpr):
    """Log masses of a segment, `[N]`, of four heads from `head` on; -inf where there is no room or no head."""
    lowest = float("-inf")
    row0 = tl.load(log_mass + head * group_stride + blocks, mask=room & (head < G), other=lowest)
    row1 = tl.load(log_mass + (head + 1) * group_stride + blocks, mask=room & (head + 1 < G), other=lowest)
    row2 = tl.load(log_mass + (head + 2) * group_stride + blocks, mask=room & (head + 2 < G), other=lowest)
    row3 = tl.load(log_mass + (head + 3) * group_stride + blocks, mask=room & (head + 3 < G), other=lowest)
    return row0, row1, row2, row3


@triton.jit
def _four(index, x0, x1, x2, x3):
    """Four scalars as a tensor."""
    return tl.where(index == 0, x0, tl.where(index == 1, x1, tl.where(index == 2, x2, x3)))


@triton.jit
def _apart(index, x):
    """The elements of a tensor of four, as scalars."""
    return sum4(
        tl.where(index == 0, x, 0.0),
        tl.where(index == 1, x, 0.0),
        tl.where(index == 2, x, 0.0),
        tl.where(index == 3, x, 0.0),
    )


@triton.jit
def segment_shares(
    row0,
    row1,
    row2,
    row3,
    log_mass,
    group_stride,
    blocks,
    room,
    inside,
    buffer,
    G: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
):
    """Mean share over the group's heads of each of a segment's blocks, `[N]`, in the whole row; and False where some
    head of the row has no shares (as in `mean_shares`), which are zeros then.

    `row0` to `row3` are the first four heads' log masses; entries that are not `inside` may hold anything. Takes
    `ceil(G / 4)` exchanges, the first ones.
    """
    lane = tl.arange(0, 4)
    shares = tl.zeros(blocks.shape, tl.float32)
    valid = tl.full((), 1, tl.int1)
    for head in tl.static_range(0, G, 4):
        if head > 0:
            row0, row1, row2, row3 = load_four(log_mass, group_stride, head, blocks, room, G)
        row0 = tl.where(inside, row0, float("-inf"))
        row1 = tl.where(inside, row1, float("-inf"))
        row2 = tl.where(inside, row2, float("-inf"))
        row3 = tl.where(inside, row3, float("-inf"))
        max0, max1, max2, max3 = max4(row0, row1, row2, row3)
        sum0, sum1, sum2, sum3 = sum4(
            relative_mass(row0, max0), relative_mass(row1, max1), relative_mass(row2, max2), relative_mass(row3, max3)
        )
        maxima, sums = exchange_pairs(
            _four(lane, max0, max1, max2, max3), _four(lane, sum0, sum1, sum2, sum3), buffer, head // 4, K, T
        )
        highest = tl.max(maxima, 0)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(sums * score_tile.exp2((maxima - shift[None, :]) * _LOG2_E), 0)
        present = head + lane < G
        valid = valid & (tl.min(((total > 0) | (head + lane >= G)).to(tl.int32), 0) > 0)
        factor0, factor1, factor2, factor3 = _apart(
            lane, tl.where(present, 1.0 / tl.where(present, total * G, 1.0), 0.0)
        )
        # Anew, relative to the row's maxima: equal log masses have equal shares, whatever segment they are in.
        max0, max1, max2, max3 = _apart(lane, highest)
        # With products fused by name, as in `relative_mass`: the keys that are counted, in one layout, have to be those
        # that are kept, in another, to the last bit.
        shares = tl.fma(relative_mass(row0, max0), factor0, shares)
        shares = tl.fma(relative_mass(row1, max1), factor1, shares)
        shares = tl.fma(relative_mass(row2, max2), factor2, shares)
        shares = tl.fma(relative_mass(row3, max3), factor3, shares)
    return tl.where(valid, shares, 0.0), valid


@triton.jit
def _first_thresholds(guess, T: tl.constexpr):
    """0, 2.0, and between them most in the six octaves from the guess on. `[T]` int32."""
    i = tl.arange(0, T)
    DENSE: tl.constexpr = T - T // 4
    STEP: tl.constexpr = (6 << 23) // DENSE
    guess = tl.minimum(tl.maximum(guess, 1), _TWO - 1)
    top = guess + DENSE * STEP
    step = tl.maximum(_TWO - top, 0) // (T - 1 - DENSE)
    thresholds = tl.where(i <= DENSE, guess + (i - 1) * STEP, top + step * tl.maximum(i - DENSE, 0))
    thresholds = tl.minimum(tl.maximum(thresholds, 1), _TWO - 1)
    return tl.where(i == 0, 0, tl.where(i == T - 1, _TWO, thresholds))


@triton.jit
def _thresholds_between(low, high, low_sum, high_sum, each, goal, T: tl.constexpr):
    """Thresholds inside `(low, high)`, `[T]` int32: evenly over more than an octave; in less, where shares are spread
    about evenly, most where the sums at both ends say that the goal is, and some on either side."""
    i = tl.arange(0, T)
    EDGE: tl.constexpr = T // 8
    span = (high - low).to(tl.float32)
    between = tl.maximum(low_sum - high_sum, 1).to(tl.float32)
    place = (low_sum - goal).to(tl.float32) / between
    count = between / tl.maximum(each, 1).to(tl.float32)
    wide = high - low > (1 << 23)
    far = tl.minimum(1.5 / tl.sqrt(tl.maximum(count, 1.0)), 0.5)
    start = tl.where(wide, 0.0, tl.maximum(place - far, 0.0))
    stop = tl.where(wide, 1.0, tl.minimum(place + far, 1.0))
    inner = start + (stop - start) * ((i - EDGE).to(tl.float32) / (T - 2 * EDGE - 1))
    below = start * ((i + 1).to(tl.float32) / (EDGE + 1))
    above = stop + (1.0 - stop) * ((i - (T - EDGE) + 1).to(tl.float32) / (EDGE + 1))
    at = tl.where(i < EDGE, below, tl.where(i < T - EDGE, inner, above))
    return tl.minimum(tl.maximum(low + (span * at).to(tl.int32), low + 1), high - 1)


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _sum_pair(x0, x1):
    """Sums of two tensors over their first axis. The interpreter reduces tuples element by element."""
    if _INTERPRETED:
        return tl.sum(x0, 0), tl.sum(x1, 0)
    else:
        return tl.reduce((x0, x1), 0, _add_pairs)


@triton.jit
def _reached(keys, weights, thresholds, segment, buffer, number, K: tl.constexpr):
    """For each threshold, `[T]` int32: the sum of the weights of the row's keys at or above it, their number, and how
    many of them are in segments before this one."""
    above = keys[:, None] >= thresholds[None, :]
    sums, counts = _sum_pair(tl.where(above, weights[:, None], 0), above.to(tl.int32))
    words = exchange(sums.to(tl.int64) | (counts.to(tl.int64) << _COUNT_SHIFT), buffer, number, K, thresholds.shape[0])
    earlier = tl.arange(0, K)[:, None] < segment
    total, before = _sum_pair(words, tl.where(earlier, (words >> _COUNT_SHIFT).to(tl.int32), 0))
    return (total & _SUM_MASK).to(tl.int32), (total >> _COUNT_SHIFT).to(tl.int32), before


@triton.jit
def _narrowest(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    a0, a1, a2, a3 = tl.maximum(a0, b0), tl.minimum(a1, b1), tl.minimum(a2, b2), tl.minimum(a3, b3)
    a4, a5, a6, a7 = tl.minimum(a4, b4), tl.maximum(a5, b5), tl.maximum(a6, b6), tl.maximum(a7, b7)
    return a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit
def _narrow(
    enough,
    thresholds,
    sums,
    counts,
    before,
    low,
    low_sum,
    low_count,
    low_before,
    high,
    high_sum,
    high_count,
    high_before,
):
    """The bracket after a pass: the highest threshold that is enough, the lowest that is not, and what is reached from
    each. Thresholds need not be in order: what is reached falls as they rise, so the least reached among those that are
    enough belongs to the highest of them."""
    low, low_sum = tl.where(enough, thresholds, low), tl.where(enough, sums, low_sum)
    low_count, low_before = tl.where(enough, counts, low_count), tl.where(enough, before, low_before)
    high, high_sum = tl.where(enough, high, thresholds), tl.where(enough, high_sum, sums)
    high_count, high_before = tl.where(enough, high_count, counts), tl.where(enough, high_before, before)
    if _INTERPRETED:
        lows = (tl.max(low, 0), tl.min(low_sum, 0), tl.min(low_count, 0), tl.min(low_before, 0))
        return *lows, tl.min(high, 0), tl.max(high_sum, 0), tl.max(high_count, 0), tl.max(high_before, 0)
    else:
        bracket = (low, low_sum, low_count, low_before, high, high_sum, high_count, high_before)
        return tl.reduce(bracket, 0, _narrowest)


@triton.jit
def smallest_set_of_segments(
    shares,
    valid,
    blocks,
    blocks_in_row,
    sink,
    tail,
    segment,
    goal,
    guess,
    buffer,
    number,
    BY_COUNT: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
):
    """What `smallest_set` finds, in segments.

    Args:
        shares: `[N]` fp32, of the segment; `valid` tells whether the row has any: if not, it keeps all blocks.
        blocks: `[N]` int32, the segment's blocks, from `segment * N` on.
        sink, tail: the free blocks are `[sink, tail)`.
        goal: int32, what the weights must reach.
        guess: int32, the first threshold to test; a good one saves passes.
        number: int32, exchanges that were done before.

    Returns:
        `[N]` bool, the blocks that are kept; how many are kept in segments before; how many in the row.
    """
    # Forced blocks count as larger than any share.
    inside = blocks < blocks_in_row
    patterns = shares.to(tl.int32, bitcast=True)
    keys = tl.where((blocks >= sink) & (blocks < tail), patterns, _FORCED)
    keys = tl.where(inside, keys, -1)
    weights = tl.where(inside, weight(patterns, BY_COUNT), 0)

    none = tl.zeros((), tl.int32)
    number = none + number
    most = none + _FORCED
    thresholds = _first_thresholds(guess, T)
    sums, counts, before = _reached(keys, weights, thresholds, segment, buffer, number, K)
    low, low_sum, low_count, low_before, high, high_sum, high_count, high_before = _narrow(
        (sums >= goal) & valid, thresholds, sums, counts, before,
        none - 1, most, most, most, none + _TWO + 1, none, none, none,
    )  # fmt: skip
    # From the lowest threshold, 0, on there are all blocks, from the highest, 2.0, the forced ones: `low` is -1 where
    # the goal is out of reach, and 2.0 where those do.
    if low < 0:
        low = none
        low_count = blocks_in_row
        low_before = tl.minimum(segment * shares.shape[0], blocks_in_row)
        searching = none > 0
    else:
        searching = high <= _TWO
    each = weight(low, BY_COUNT)
    # Invariant while searching: the weights from `low` reach the goal, those from `high` do not. Every block from `low`
    # on weighs at least `each`: it is over where the goal needs the least of them, and where one block is between.
    while searching & (high - low > 1) & (low_sum - goal >= each) & ((low_sum - high_sum) // 2 >= each):
        number += 1
        thresholds = _thresholds_between(low, high, low_sum, high_sum, each, goal, T)
        sums, counts, before = _reached(keys, weights, thresholds, segment, buffer, number, K)
        low, low_sum, low_count, low_before, high, high_sum, high_count, high_before = _narrow(
            sums >= goal, thresholds, sums, counts, before,
            low, low_sum, low_count, low_before, high, high_sum, high_count, high_before,
        )  # fmt: skip
        each = weight(low, BY_COUNT)
    kept = (keys >= low) & inside
    if searching & (low_sum - goal >= each) & ((low_sum - high_sum) // 2 >= each):
        # The keys in [low, high) are equal, and more than it takes.
        ties = (goal - high_sum + each - 1) // tl.maximum(each, 1)
        tied = kept & (keys < high)
        tied_before = low_before - high_before
        kept = (kept & (keys >= high)) | (tied & (tl.cumsum(tied.to(tl.int32), 0) + tied_before <= ties))
        low_before = high_before + tl.minimum(tied_before, ties)
        low_count = high_count + ties
    return kept, low_before, low_count
