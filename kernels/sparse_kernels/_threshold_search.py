"""The smallest set of blocks whose weights reach a goal, without a sort: bisection over the bit patterns of the shares.

Shares are non-negative fp32, so their int32 patterns have the same order: these are the keys, -1 for blocks that take
no part (forced blocks and those beyond the row). A weight is the share in units of 2**-30, or 1 when blocks are
counted, packed below a count of 1 at bit 44: one integer sum gives the mass and the number of the blocks above a
threshold, exactly and in any order.
"""

import triton
import triton.language as tl

from ._selection import COUNT_SHIFT, MASS_BITS

_COUNT_SHIFT = tl.constexpr(COUNT_SHIFT)
_MASS_MASK = tl.constexpr(2**COUNT_SHIFT - 1)
_MASS_UNIT = tl.constexpr(float(2**MASS_BITS))
KEY_MASK = tl.constexpr(0x7FFFFFFF)
KEPT_FLAG = tl.constexpr(-(2**31))
"""Sign bit of a key in scratch: an earlier head of the group keeps the block."""


@triton.jit
def goal_of(target, blocks, BY_COUNT: tl.constexpr):
    """What the weights must reach: `target` is top_k or gamma. At least 1, so that a row keeps a block."""
    if BY_COUNT:
        goal = tl.ceil(tl.where(target >= 1, target, target * blocks.to(tl.float32))).to(tl.int64)
    else:
        goal = (target * _MASS_UNIT).to(tl.int64)
    return tl.maximum(goal, 1)


@triton.jit
def first_guess(target, blocks, BY_COUNT: tl.constexpr):
    """The first threshold to test: with every share from `(1 - gamma) / blocks` on, gamma is reached."""
    rest = 1.0 / 32 if BY_COUNT else 1.0 - target
    return (rest / blocks.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def free_range(length, sink_blocks, window_tokens, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The free blocks of a row of `length` tokens, first and end; the others are forced."""
    end = length // PAGE * (PAGE // BLOCK)
    in_window = tl.maximum(length - window_tokens, 0) // BLOCK
    end = tl.where(window_tokens > 0, tl.minimum(end, in_window), end)
    return tl.minimum(sink_blocks, end), end


@triton.jit
def packed_weights(keys, BY_COUNT: tl.constexpr):
    """Weights of keys, `1 << 44` for the count included; 0 for keys below 0."""
    taking_part = keys >= 0
    if BY_COUNT:
        weights = tl.full(keys.shape, 1, tl.int64)
    else:
        shares = tl.where(taking_part, keys, 0).to(tl.float32, bitcast=True)
        weights = (shares * _MASS_UNIT + 0.5).to(tl.int64)
    one = tl.full(keys.shape, 1, tl.int64) << _COUNT_SHIFT
    return tl.where(taking_part, weights + one, 0)


@triton.jit
def free_keys(patterns, blocks, sink, tail):
    """Keys of free blocks, those in `[sink, tail)`; -1 for others."""
    return tl.where((blocks >= sink) & (blocks < tail), patterns & KEY_MASK, -1)


@triton.jit
def _sum_from(threshold, patterns, first, last, CHUNK: tl.constexpr, BY_COUNT: tl.constexpr):
    """Packed sum of the weights of keys at or above a threshold; `[first, last)` are the free blocks."""
    total = tl.zeros((CHUNK,), tl.int64)
    for start in range(first // CHUNK * CHUNK, last, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        chunk = free_keys(tl.load(patterns + blocks, mask=blocks < last, other=0), blocks, first, last)
        total += tl.where(chunk >= threshold, packed_weights(chunk, BY_COUNT), 0)
    return tl.sum(total)


@triton.jit
def search(missing, highest, guess, patterns, first, last, CHUNK: tl.constexpr, BY_COUNT: tl.constexpr):
    """Finds the free blocks to keep.

    Args:
        missing: int64, what the weights of the kept free blocks must reach.
        highest: the largest key.
        guess: the first threshold to test; a good one saves steps.
        patterns: pointer to the row's shares.
        first, last: the free blocks are `[first, last)`.

    Returns:
        `low`, `high`, `ties`, `surplus`: keep all keys at or above `high`, and of those in `[low, high)`, which are
        equal, the `ties` with the lowest index; `surplus` tells whether there are more than `ties`.
    """
    low = tl.zeros((), tl.int32)
    high = highest + 1
    low_sum = _sum_from(low, patterns, first, last, CHUNK, BY_COUNT)
    high_sum = tl.zeros((), tl.int64)
    reachable = (low_sum & _MASS_MASK) >= missing
    searching = (missing > 0) & reachable
    middle = tl.minimum(tl.maximum(guess, low + 1), high - 1)
    # Invariant while searching: the weights from `low` reach `missing`, those from `high` do not.
    while searching & (high - low > 1) & ((low_sum >> _COUNT_SHIFT) - (high_sum >> _COUNT_SHIFT) > 1):
        middle_sum = _sum_from(middle, patterns, first, last, CHUNK, BY_COUNT)
        enough = (middle_sum & _MASS_MASK) >= missing
        low = tl.where(enough, middle, low)
        low_sum = tl.where(enough, middle_sum, low_sum)
        high = tl.where(enough, high, middle)
        high_sum = tl.where(enough, high_sum, middle_sum)
        middle = low + (high - low) // 2
    equal = (low_sum >> _COUNT_SHIFT) - (high_sum >> _COUNT_SHIFT)
    each = ((low_sum & _MASS_MASK) - (high_sum & _MASS_MASK)) // tl.maximum(equal, 1)
    short = missing - (high_sum & _MASS_MASK)
    each = tl.maximum(each, 1)
    ties = (short + each - 1) // each
    # Nothing missing: no free block. Out of reach: all of them.
    low = tl.where(missing > 0, low, KEY_MASK)
    high = tl.where(searching, high, low)
    ties = tl.where(searching, ties, 0).to(tl.int32)
    return low, high, ties, searching & (equal > ties)
