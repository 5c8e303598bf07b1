"""Which blocks a row keeps, for rows too long for a program's registers: their shares go through scratch, in chunks."""

import triton
import triton.language as tl

from . import _threshold_search as threshold_search


@triton.jit
def _head_statistics(log_mass, blocks_in_row, CHUNK: tl.constexpr):
    """Largest log mass of a head, and the sum of `exp(log_mass - largest)`, not positive if shares do not exist."""
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, blocks_in_row, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        chunk = tl.load(log_mass + blocks, mask=blocks < blocks_in_row, other=float("-inf"))
        new_highest = tl.maximum(highest, tl.max(chunk, 0))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(chunk - shift), 0)
        highest = new_highest
    return highest, total


@triton.jit
def _mark(keys, low, high, ties, surplus, seen):
    """Which keys a search result keeps, and the ties seen so far, `seen` before this chunk."""
    kept = keys >= low
    if surplus:
        tied = kept & (keys < high)
        rank = seen + tl.cumsum(tied.to(tl.int32), 0)
        kept = (keys >= high) | (tied & (rank <= ties))
        seen += tl.sum(tied.to(tl.int32))
    return kept & (keys >= 0), seen


@triton.jit
def select_chunked(
    log_mass,
    group_stride,
    patterns,
    goal,
    guess,
    blocks_in_row,
    sink,
    tail,
    lists,
    flags,
    HAS_FLAGS: tl.constexpr,
    G: tl.constexpr,
    EVERY: tl.constexpr,
    BY_COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes the list of a row of any length, and with HAS_FLAGS a byte a block; returns the list's length.

    `patterns` is the row's scratch: shares, with KEPT_FLAG set for free blocks to keep. The free blocks are
    `[sink, tail)`.
    """
    valid = tl.full((), 1, tl.int32)
    HEADS: tl.constexpr = G if EVERY else 1
    GROUP: tl.constexpr = 1 if EVERY else G
    for head in range(HEADS):
        highest_key = tl.full((), -1, tl.int32)
        forced_sum = tl.zeros((), tl.int64)
        for g in range(GROUP):
            row = log_mass + (head + g) * group_stride
            highest, total = _head_statistics(row, blocks_in_row, CHUNK)
            highest = tl.where(highest == float("-inf"), 0.0, highest)
            valid = tl.where(total > 0, valid, 0)
            for start in range(0, blocks_in_row, CHUNK):
                blocks = start + tl.arange(0, CHUNK)
                inside = blocks < blocks_in_row
                share = tl.exp(tl.load(row + blocks, mask=inside, other=float("-inf")) - highest)
                share = tl.where(total > 0, share / total, 0.0)
                before = tl.load(patterns + blocks, mask=inside & (head + g > 0), other=0)
                flag = before & threshold_search.KEPT_FLAG
                if GROUP > 1:
                    share += before.to(tl.float32, bitcast=True)
                    flag = tl.zeros_like(flag)
                if g == GROUP - 1:
                    share = share / GROUP
                    pattern = share.to(tl.int32, bitcast=True) & threshold_search.KEY_MASK
                    free = threshold_search.free_keys(pattern, blocks, sink, tail)
                    forced = tl.where(inside & (free < 0), pattern, -1)
                    highest_key = tl.maximum(highest_key, tl.max(free, 0))
                    forced_sum += tl.sum(threshold_search.packed_weights(forced, BY_COUNT))
                tl.store(patterns + blocks, share.to(tl.int32, bitcast=True) | flag, mask=inside)
            # The next pass may read a pattern in another thread.
            tl.debug_barrier()
        low, high, ties, surplus = threshold_search.search(
            goal - (forced_sum & threshold_search._MASS_MASK),
            highest_key,
            guess,
            patterns,
            sink,
            tail,
            CHUNK,
            BY_COUNT,
        )
        tl.debug_barrier()
        seen = tl.zeros((), tl.int32)
        for start in range(sink // CHUNK * CHUNK, tail, CHUNK):
            blocks = start + tl.arange(0, CHUNK)
            pattern = tl.load(patterns + blocks, mask=blocks < tail, other=0)
            keys = threshold_search.free_keys(pattern, blocks, sink, tail)
            kept, seen = _mark(keys, low, high, ties, surplus, seen)
            tl.store(patterns + blocks, pattern | threshold_search.KEPT_FLAG, mask=kept)
        tl.debug_barrier()
    count = tl.zeros((), tl.int32)
    for start in range(0, blocks_in_row, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        inside = blocks < blocks_in_row
        flagged = tl.load(patterns + blocks, mask=inside, other=0) < 0
        kept = inside & (flagged | (blocks < sink) | (blocks >= tail) | (valid == 0))
        ranks = tl.cumsum(kept.to(tl.int32), 0)
        tl.store(lists + count + ranks - 1, blocks, mask=kept)
        count += tl.sum(kept.to(tl.int32))
        if HAS_FLAGS:
            tl.store(flags + blocks, kept.to(tl.uint8), mask=inside)
    return count
