"""A row of a selection rule, done by one program."""

import triton
import triton.language as tl

from . import _threshold_search as threshold_search
from ._select_chunked import select_chunked
from ._select_single import select_single


@triton.jit
def select_row(
    mass,
    mass_group_stride,
    length,
    target,
    lists,
    patterns,
    row_mask,
    sink_blocks,
    window_tokens,
    min_context,
    G: tl.constexpr,
    EVERY: tl.constexpr,
    BY_COUNT: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZES: tl.constexpr,
    LONGER: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Writes a row's list, and its mask if there is one, and returns the list's length.

    All pointers are the row's; `target` is top_k if BY_COUNT, else gamma. `patterns` is scratch of the row's capacity,
    4 bytes a block. The row goes through registers if it has at most as many blocks as one of SIZES (ascending); longer
    ones, which only LONGER allows, go through scratch in chunks.
    """
    blocks_in_row = tl.cdiv(length, BLOCK)
    # Forced: [0, sink) and [tail, blocks_in_row).
    sink, tail = threshold_search.free_range(length, sink_blocks, window_tokens, PAGE, BLOCK)
    limit = blocks_in_row.to(tl.float32) if BY_COUNT else 1.0
    count = blocks_in_row
    # A NaN target selects nothing: it keeps all blocks.
    if (length >= min_context) & (target < limit) & (blocks_in_row > 0):
        goal = threshold_search.goal_of(target, blocks_in_row, BY_COUNT)
        guess = threshold_search.first_guess(target, blocks_in_row, BY_COUNT)
        row_flags = patterns.to(tl.pointer_type(tl.uint8))
        if row_mask is not None:
            row_flags = row_mask
        # A row takes the least of these sizes that holds it, whatever the capacity.
        smaller = 0
        for index in tl.static_range(len(SIZES)):
            if (blocks_in_row > smaller) & (blocks_in_row <= SIZES[index]):
                count = select_single(
                    mass,
                    mass_group_stride,
                    goal.to(tl.int32),
                    guess,
                    blocks_in_row,
                    sink,
                    tail,
                    lists,
                    row_flags,
                    G,
                    EVERY,
                    BY_COUNT,
                    SIZES[index],
                    ALIGNED,
                )
            smaller = SIZES[index]
        if LONGER:  # noqa: SIM102 - a condition of the compiler's
            if blocks_in_row > smaller:
                count = select_chunked(
                    mass,
                    mass_group_stride,
                    patterns,
                    goal,
                    guess,
                    blocks_in_row,
                    sink,
                    tail,
                    lists,
                    row_flags,
                    row_mask is not None,
                    G,
                    EVERY,
                    BY_COUNT,
                    CHUNK,
                )
    else:
        for start in range(0, blocks_in_row, CHUNK):
            blocks = start + tl.arange(0, CHUNK)
            tl.store(lists + blocks, blocks, mask=blocks < blocks_in_row)
            if row_mask is not None:
                tl.store(row_mask + blocks, tl.full((CHUNK,), 1, tl.uint8), mask=blocks < blocks_in_row)
    return count
