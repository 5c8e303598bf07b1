"""Shares of the fused pass by cost: a row's page counts for more if the row kept much in the call before.

The rows `(request, KV head)` lie one after another in cost space, those of a KV head side by side: a row with `p` pages
of weight `w` takes `p * w` of it. Program `i * Hkv + h` has number `h * n + i`, with `n` programs a head, as with equal
runs of pages, and number `m` takes `[m * share, (m + 1) * share)`. A page is worked on by the program in whose range it
begins, so that borders are found by ceil division. A share is at least the largest weight: a page begins in every
range before the last page's beginning, and the programs of a row have numbers without a gap.

Where there are many programs for each row (`aligned`), rows begin at the borders of shares instead: a program with the
end of a row and the beginning of the next one would find two pseudo-maxima, which takes longer than all that it scans.
A share is then so large that the programs suffice although each row may leave most of one idle.

Whatever the counts of the call before, each page has one program: they decide about balance only. Only the pass reads
them; it notes the numbers of each row's first and last program (`spans`), which is all that the combine has to know,
so that the combine may write them.
"""

import triton
import triton.language as tl

from . import _work_split as work_split

PAGE_WEIGHT = 8
"""Of a page that is only scanned."""

KEPT_WEIGHT = 32
"""What a page weighs more if all of its blocks are kept: four scans.

On an H200 (docs/performance.md, top-delta: batch 4, 262,144 tokens, with the tail) each percent of kept blocks adds 9.5
us with 4 bits and 10.1 us with 2, and scanning alone would take 260 and 220 us, less what any launch takes: ratios of
3.7 and 4.6. By bytes they would be 7 and 12, but scans are bound by unpacking.
"""

ALIGNED_PROGRAMS = 32
"""Programs for each row from which on rows begin at the borders of shares, which makes shares a 31st larger at most."""

LAST = tl.constexpr((1 << 31) - 1)


def fits(rows: int, pages: int) -> bool:
    """Whether the cost of `rows` rows of at most `pages` pages is below 2^30, so that it can be shared out."""
    return rows * pages * (PAGE_WEIGHT + KEPT_WEIGHT) < 2**30


def aligned(rows: int, programs: int) -> bool:
    """Whether no program has pages of two rows."""
    return rows < programs and rows * ALIGNED_PROGRAMS <= programs


@triton.jit
def row_weights(kept, lengths, BLOCK: tl.constexpr, PAGE_WEIGHT: tl.constexpr, KEPT_WEIGHT: tl.constexpr):
    """Weights of pages in rows of these lengths that kept so many blocks; counts out of range are the nearest in it.

    In integers, so that all programs agree.
    """
    blocks = tl.maximum((lengths + BLOCK - 1) // BLOCK, 1)
    inside = tl.minimum(tl.maximum(kept, 0), blocks)
    return PAGE_WEIGHT + (inside * KEPT_WEIGHT + blocks // 2) // blocks


@triton.jit
def _rows_from(
    start,
    seq_lens,
    last_kept,
    batch,
    kv_heads,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_WEIGHT: tl.constexpr,
    KEPT_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Units and weights of `ROWS` rows from `start` on; row `h * batch + b` is request b's of KV head h."""
    rows = start + tl.arange(0, ROWS)
    inside = rows < batch * kv_heads
    b, h = rows % batch, rows // batch
    lengths = tl.load(seq_lens + b, mask=inside, other=0)
    kept = tl.load(last_kept + b * kv_heads + h, mask=inside, other=0)
    weights = row_weights(kept, lengths, BLOCK, PAGE_WEIGHT, KEPT_WEIGHT)
    return rows, work_split.row_units(lengths, 0, PAGE, 1), weights


@triton.jit
def program_range(
    number,
    seq_lens,
    last_kept,
    batch,
    kv_heads,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_WEIGHT: tl.constexpr,
    KEPT_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """First cost and end of a program's range; a page begins in it unless it is empty."""
    total = tl.zeros((), tl.int32)
    limit = tl.zeros((), tl.int32)
    largest = tl.zeros((), tl.int32)
    for start in range(0, batch * kv_heads, ROWS):
        _, units, weights = _rows_from(
            start, seq_lens, last_kept, batch, kv_heads, PAGE, BLOCK, PAGE_WEIGHT, KEPT_WEIGHT, ROWS
        )
        costs = units * weights
        # No page begins after this, but for those of further rows.
        begins = total + tl.cumsum(costs, 0) - weights
        limit = tl.maximum(limit, tl.max(tl.where(units > 0, begins + 1, 0)))
        largest = tl.maximum(largest, tl.max(tl.where(units > 0, weights, 0)))
        total += tl.sum(costs)
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), largest)
    # `number * share` may be beyond 32 bits for the last of many programs with little to do each.
    first = tl.minimum(number.to(tl.int64) * share, limit).to(tl.int32)
    return first, tl.minimum(first + share, limit)


@triton.jit
def find_row(
    cost,
    seq_lens,
    last_kept,
    batch,
    kv_heads,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_WEIGHT: tl.constexpr,
    KEPT_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Request and KV head of the first page that begins at `cost` or after, the cost before that row, and its weight.

    There must be such a page.
    """
    row = tl.full((), LAST, tl.int32)
    before = tl.full((), LAST, tl.int32)
    weight = tl.full((), PAGE_WEIGHT, tl.int32)
    counted = tl.zeros((), tl.int32)
    for start in range(0, batch * kv_heads, ROWS):
        rows, units, weights = _rows_from(
            start, seq_lens, last_kept, batch, kv_heads, PAGE, BLOCK, PAGE_WEIGHT, KEPT_WEIGHT, ROWS
        )
        costs = units * weights
        ends = counted + tl.cumsum(costs, 0)
        reached = (units > 0) & (ends - weights >= cost)
        row = tl.minimum(row, tl.min(tl.where(reached, rows, LAST)))
        before = tl.minimum(before, tl.min(tl.where(reached, ends - costs, LAST)))
        weight += tl.sum(tl.where(rows == row, weights - PAGE_WEIGHT, 0))
        counted += tl.sum(costs)
    return row % batch, row // batch, before, weight


@triton.jit
def aligned_range(
    number,
    seq_lens,
    last_kept,
    batch,
    kv_heads,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_WEIGHT: tl.constexpr,
    KEPT_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Request, KV head, first page and end of a program where rows are `aligned`; first page and end are equal if there
    is nothing for it."""
    total = tl.zeros((), tl.int32)
    present = tl.zeros((), tl.int32)
    largest = tl.full((), 1, tl.int32)
    for start in range(0, batch * kv_heads, ROWS):
        _, units, weights = _rows_from(
            start, seq_lens, last_kept, batch, kv_heads, PAGE, BLOCK, PAGE_WEIGHT, KEPT_WEIGHT, ROWS
        )
        total += tl.sum(units * weights)
        present += tl.sum((units > 0).to(tl.int32))
        largest = tl.maximum(largest, tl.max(tl.where(units > 0, weights, 0)))
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0) - present), largest)
    row = tl.zeros((), tl.int32)
    row_start = tl.zeros((), tl.int32)
    pages = tl.zeros((), tl.int32)
    weight = tl.zeros((), tl.int32)
    counted = tl.zeros((), tl.int32)
    for start in range(0, batch * kv_heads, ROWS):
        rows, units, weights = _rows_from(
            start, seq_lens, last_kept, batch, kv_heads, PAGE, BLOCK, PAGE_WEIGHT, KEPT_WEIGHT, ROWS
        )
        # Programs in whose share of the row a page begins.
        programs = tl.where(units > 0, (units - 1) * weights // share + 1, 0)
        ends = counted + tl.cumsum(programs, 0)
        own = (number < ends) & (number >= ends - programs)
        row += tl.sum(tl.where(own, rows, 0))
        row_start += tl.sum(tl.where(own, ends - programs, 0))
        pages += tl.sum(tl.where(own, units, 0))
        weight += tl.sum(tl.where(own, weights, 0))
        counted += tl.sum(programs)
    cost = (number - row_start) * share
    weight = tl.maximum(weight, 1)
    # Not of a number without a row, whose cost may be anything.
    first = tl.where(pages > 0, tl.cdiv(cost, weight), 0)
    return row % batch, row // batch, first, tl.minimum(pages, tl.cdiv(cost + share, weight))
