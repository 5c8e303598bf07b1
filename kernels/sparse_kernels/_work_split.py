"""Equal shares of a batch's pages for a fixed grid, found on the device.

A unit is a tile of `TILE_PAGES` closed pages, or an open page, of one request. Units are ordered by request, then
position. A grid of `n * Hkv` programs gives each KV head `n` of them: program `i * Hkv + h` takes units `[i * share,
(i + 1) * share)` of head `h`, with `share = ceil(total / n)`. So the heads of a page, whose summaries lie side by side,
are read at about the same time. Requests shorter than `min_context` have no units.
"""

import triton
import triton.language as tl


@triton.jit
def row_units(lengths, min_context, PAGE: tl.constexpr, TILE_PAGES: tl.constexpr):
    """Units of rows with these lengths."""
    closed = (lengths // PAGE + TILE_PAGES - 1) // TILE_PAGES
    units = closed + (lengths % PAGE != 0).to(tl.int32)
    return tl.where(lengths >= min_context, units, 0)


@triton.jit
def program_share(
    seq_lens, batch, kv_heads, min_context, PAGE: tl.constexpr, TILE_PAGES: tl.constexpr, REQUESTS: tl.constexpr
):
    """First unit and end of this program's share, and its KV head."""
    total = tl.zeros((), tl.int32)
    for start in range(0, batch, REQUESTS):
        requests = start + tl.arange(0, REQUESTS)
        lengths = tl.load(seq_lens + requests, mask=requests < batch, other=0)
        total += tl.sum(row_units(lengths, min_context, PAGE, TILE_PAGES))
    share = tl.cdiv(total, tl.num_programs(0) // kv_heads)
    first = tl.minimum(tl.program_id(0) // kv_heads * share, total)
    return first, tl.minimum(first + share, total), tl.program_id(0) % kv_heads


@triton.jit
def find_request(
    unit, seq_lens, batch, min_context, PAGE: tl.constexpr, TILE_PAGES: tl.constexpr, REQUESTS: tl.constexpr
):
    """The request that holds a unit, and the units before that request. `unit` must be below the total."""
    request = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    counted = tl.zeros((), tl.int32)
    for start in range(0, batch, REQUESTS):
        requests = start + tl.arange(0, REQUESTS)
        lengths = tl.load(seq_lens + requests, mask=requests < batch, other=0)
        units = row_units(lengths, min_context, PAGE, TILE_PAGES)
        ends = counted + tl.cumsum(units, 0)
        passed = ends <= unit
        request += tl.sum((passed & (requests < batch)).to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0)))
        counted += tl.sum(units)
    return request, before
