"""Log mass of every block, estimated from thumbnails."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _score_tile as score_tile
from . import _thumbnail_tile as thumbnail_tile
from . import _work_split as work_split
from ._checks import check_block_mass, check_choice
from ._dispatch import INTERPRETED, planned_programs, use_triton
from ._reference import block_logsumexp, block_maximum, rows_to_score, write_open_page
from .thumbnail import BITS, check_thumbnails, unpack_codes

_MORE_WARPS, _MORE_REGISTERS = (16, 128), (12, 168)
"""Warps that run on a multiprocessor, and the registers of a thread that let them. More warps with fewer registers,
which then are spilled inside the loop, take up to a third longer."""


@dataclass(frozen=True)
class _Launch:
    """How the kernel runs.

    Attributes:
        pair: pages of a tile, 1 or 2.
        by_column: whether the folded query is spread over the threads by columns as well as by channels. Otherwise each
            thread holds all columns of its channels, and the sum over channels takes five shuffles for each.
        warps: warps of a program.
        occupancy: warps of a multiprocessor, and registers of a thread.
    """

    pair: int
    by_column: bool
    warps: int
    occupancy: tuple[int, int]


def _launch(batch: int, group: int, head_dim: int, page_size: int) -> _Launch:
    """The launch for a group of `group` (padded) query heads; measured on an H200 (docs/performance.md).

    A warp holds a page of 64 tokens and 128 channels. More warps share a program only for larger tiles: they would have
    to meet at barriers for every page.
    """
    elements = page_size * triton.next_power_of_2(head_dim) * group
    if group < 8:
        # Tensor cores multiply with eight columns at a time: with four heads, those of two pages. One request alone is
        # shared out in single pages: with pairs, some programs would have a sixth more than others.
        pair = 2 if batch > 1 else 1
        occupancy = _MORE_REGISTERS if pair == 2 else _MORE_WARPS
        return _Launch(pair, False, min(8, max(1, elements // (8192 * 4))), occupancy)
    warps = min(8, max(1, elements // (8192 * 8)))
    return _Launch(1, True, warps, _MORE_REGISTERS if elements >= 8192 * 8 else _MORE_WARPS)


def block_mass_thumbnail_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    bits: int,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
    block_max: torch.Tensor | None = None,
) -> None:
    """Torch reference of `block_mass_thumbnail`."""
    head_dim = q.shape[2]
    for row in rows_to_score(q, k_pool, page_table, seq_lens, page_size, min_context):
        write_open_page(row, scale, block_size, out, block_max)
        if row.closed == 0:
            continue
        pages = row.pages[: row.closed]
        low, step = low_step[pages].float().unsqueeze(2).unbind(3)  # [pages, Hkv, 1, D]
        levels = unpack_codes(codes[pages], bits, head_dim).float()  # [pages, Hkv, page_size, D]
        scores = torch.matmul(row.q * step, levels.transpose(2, 3)) + (row.q * low).sum(3, keepdim=True)
        scores = scores.permute(1, 2, 0, 3).flatten(2) * scale
        mass = block_logsumexp(scores, block_size)
        out[row.index, :, :, : mass.shape[2]] = mass
        if block_max is not None:
            block_max[row.index, :, :, : mass.shape[2]] = block_maximum(scores, block_size)


@triton.jit
def _load_bounds(
    low_step,
    pages,
    page,
    closed,
    kv_heads,
    h,
    channels,
    pairs,
    real,
    D: tl.constexpr,
    PAIR: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):
    """Bit patterns of low and step of PAIR pages from the row's page `page` on, `[channels, columns of a product]`, or
    `[channels, 1]` for a single page unless BY_COLUMN; of the last closed page for those behind it."""
    last = tl.maximum(closed - 1, 0)
    real = real & (closed > 0)
    summary = tl.load(pages + tl.minimum(page, last)).to(tl.int64) * kv_heads + h
    if BY_COLUMN:
        # The same address in every column: threads of a channel read it together.
        low, step = thumbnail_tile.load_bounds(
            low_step, summary + 0 * pairs, channels, real & (pairs >= 0), D, VECTORS=True
        )
    else:
        low, step = thumbnail_tile.load_bounds(low_step, summary, channels, real, D)
    if PAIR == 2:
        summary = tl.load(pages + tl.minimum(page + 1, last)).to(tl.int64) * kv_heads + h
        low1, step1 = thumbnail_tile.load_bounds(low_step, summary, channels, real, D)
        low = tl.where(pairs % 2 == 0, low, low1)
        step = tl.where(pairs % 2 == 0, step, step1)
    return low, step


@triton.jit
def _store_tile(out_row, group_stride, mass, tile, closed, G: tl.constexpr, PAIR: tl.constexpr):
    """Stores the log masses of a tile's blocks, `[blocks of a page, heads * PAIR]`."""
    BLOCKS: tl.constexpr = mass.shape[0]
    columns = tl.arange(0, mass.shape[1])[None, :]
    heads = columns // PAIR
    page = tile * PAIR + columns % PAIR
    blocks = page * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    tl.store(out_row + heads * group_stride + blocks, mass, mask=(heads < G) & (page < closed))


@triton.jit(do_not_specialize=["batch", "min_context"])
def _block_mass_thumbnail_kernel(
    q,
    k_pool,
    codes,
    low_step,
    page_table,
    seq_lens,
    out,
    block_max,
    q_batch_stride,
    q_head_stride,
    slot_stride,
    head_stride,
    page_table_stride,
    out_batch_stride,
    out_head_stride,
    out_group_stride,
    scale_log2,
    batch,
    kv_heads,
    min_context,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    SUB_ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
    PAIR: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    REQUESTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    unit, end, h = work_split.program_share(seq_lens, batch, kv_heads, min_context, PAGE, PAIR, REQUESTS)
    WORDS: tl.constexpr = BITS == 4 and HALF
    SUBS: tl.constexpr = 2 if BITS == 4 and not HALF else 4
    rows = tl.arange(0, SUBS * SUB_ROWS)[:, None]
    channels, real, inverse_factor = thumbnail_tile.channels_of(rows, D, SUB_ROWS, BITS, HALF)
    tokens = tl.arange(0, PAGE)[:, None]
    columns = tl.arange(0, SUB_ROWS)[None, :]
    # Column c of a product belongs to head c // PAIR and to page c % PAIR of a tile.
    pairs = tl.arange(0, GROUP * PAIR)[None, :]
    while unit < end:
        b, before = work_split.find_request(unit, seq_lens, batch, min_context, PAGE, PAIR, REQUESTS)
        length = tl.load(seq_lens + b)
        units = work_split.row_units(length, min_context, PAGE, PAIR)
        first = unit - before
        last = tl.minimum(units, first + end - unit)
        closed = length // PAGE
        closed_tiles = tl.cdiv(closed, PAIR)
        pages = page_table + b.to(tl.int64) * page_table_stride
        out_row = out + b.to(tl.int64) * out_batch_stride + h.to(tl.int64) * out_head_stride
        max_row = block_max
        if block_max is not None:
            max_row = block_max + b.to(tl.int64) * out_batch_stride + h.to(tl.int64) * out_head_stride
        heads = tl.arange(0, GROUP)[None, :]
        query = q + b.to(tl.int64) * q_batch_stride + (h * G + heads) * q_head_stride + channels
        if not BY_COLUMN:
            # Spreads the tile over all threads: vector loads would make several threads hold, and compute, the same
            # elements.
            query = tl.max_contiguous(query, [1, 1])
        query = tl.load(query, mask=real & (heads < G), other=0.0).to(tl.float32) * scale_log2
        query = tl.reshape(
            tl.broadcast_to(query[:, :, None], (SUBS * SUB_ROWS, GROUP, PAIR)), (SUBS * SUB_ROWS, GROUP * PAIR)
        )
        stop = tl.minimum(last, closed_tiles)
        low, step = _load_bounds(
            low_step, pages, first * PAIR, closed, kv_heads, h, channels, pairs, real, D, PAIR, BY_COLUMN
        )
        for tile in tl.range(first, stop, num_stages=STAGES):
            # The last page of an odd number stands in for the one behind it, whose blocks are not stored.
            page = tile * PAIR
            summary = tl.load(pages + page).to(tl.int64) * kv_heads + h
            packed, high = thumbnail_tile.load_codes(codes, summary, tokens, columns, True, BITS, HALF, D, PAGE)
            if PAIR == 2:
                summary = tl.load(pages + tl.minimum(page + 1, closed - 1)).to(tl.int64) * kv_heads + h
                packed1, high1 = thumbnail_tile.load_codes(codes, summary, tokens, columns, True, BITS, HALF, D, PAGE)
            folded, bias = thumbnail_tile.fold(query, low, step, inverse_factor, WORDS, HALF)
            # The bounds of the next tile, in flight while this one is scored.
            low, step = _load_bounds(
                low_step, pages, page + PAIR, closed, kv_heads, h, channels, pairs, real, D, PAIR, BY_COLUMN
            )
            bias = tl.sum(bias, 0)
            f0, f1, f2, f3 = thumbnail_tile.split_subs(folded, SUBS)
            bias = tl.broadcast_to(bias[None, :], (PAGE, GROUP * PAIR))
            start = tl.zeros_like(bias) if WORDS else bias
            scores = thumbnail_tile.score(packed, high, f0, f1, f2, f3, start, BITS, HALF)
            if PAIR == 2:
                scores1 = thumbnail_tile.score(packed1, high1, f0, f1, f2, f3, start, BITS, HALF)
                scores = tl.where(pairs % 2 == 0, scores, scores1)
            if WORDS:
                scores = scores * 16777216.0 + bias
            mass = score_tile.block_log_mass(scores, BLOCK)
            _store_tile(out_row, out_group_stride, mass, tile, closed, G, PAIR)
            if block_max is not None:
                maxima = score_tile.block_maximum(scores, BLOCK)
                _store_tile(max_row, out_group_stride, maxima, tile, closed, G, PAIR)
        if last > closed_tiles:
            score_tile.write_open_page(
                score_tile.load_query(q, q_batch_stride, q_head_stride, b, h, D, G, ROWS, GROUP),
                k_pool + h * head_stride,
                slot_stride,
                pages,
                length,
                out_row,
                out_group_stride,
                scale_log2,
                G,
                D,
                PAGE,
                BLOCK,
                T,
                max_row,
            )
        unit += last - first


def _block_mass_thumbnail_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    bits: int,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
    block_max: torch.Tensor | None = None,
) -> None:
    batch, kv_heads, group_size, _ = out.shape
    head_dim = q.shape[2]
    group = score_tile.padded_group(group_size)
    half = q.dtype != torch.float32 and not INTERPRETED
    launch = _launch(batch, group, head_dim, page_size)
    warps = min(8, launch.warps * (1 if half else 4))
    warps_per_multiprocessor, registers = launch.occupancy
    programs = planned_programs(q, max(2, warps_per_multiprocessor // warps), kv_heads)
    _block_mass_thumbnail_kernel[(programs,)](
        q,
        k_pool,
        codes,
        low_step.view(torch.int16),
        page_table,
        seq_lens,
        out,
        block_max,
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        page_table.stride(0),
        out.stride(0),
        out.stride(1),
        out.stride(2),
        scale * score_tile.LOG2_E.value,
        batch,
        kv_heads,
        min_context,
        BITS=bits,
        HALF=half,
        G=group_size,
        GROUP=group,
        D=head_dim,
        ROWS=triton.next_power_of_2(head_dim),
        SUB_ROWS=triton.next_power_of_2(head_dim // (2 if bits == 4 and not half else 4)),
        PAGE=page_size,
        BLOCK=block_size,
        T=max(16, block_size),
        PAIR=launch.pair,
        BY_COLUMN=launch.by_column,
        REQUESTS=score_tile.REQUESTS,
        STAGES=3,
        num_warps=warps,
        maxnreg=registers if half else None,
    )


def block_mass_thumbnail(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    bits: int,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
    block_max: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Writes the log mass of closed pages' blocks from their thumbnails, and the exact one of the open page's blocks.

    `log sum_t exp(scale * (q . low + (q * step) . code_t))` over the tokens of each block. The step is folded into the
    query once for each page, so that codes go into the product as they are.

    Args:
        q: `[B, Hkv * G, D]`, pool dtype, G from 1 to 16.
        k_pool: `[pages * page_size, Hkv, D]` fp16, bf16 or fp32; read for the open pages only, so that it may be a pool
            of these alone.
        codes: `[P, Hkv, page_size, D * bits // 8]` uint8, as `thumbnail` writes it.
        low_step: `[P, Hkv, 2, D]` bfloat16, as `thumbnail` writes it.
        page_table: `[>=B, max_pages]` int32; only the first `ceil(seq_len / page_size)` entries of a row are read.
        seq_lens: `[>=B]` int32, in tokens; 0 for padded rows.
        bits: 2, 3 or 4.
        scale: factor of the scores.
        page_size: tokens in a page.
        block_size: tokens in a block; divides `page_size`.
        min_context: rows with fewer tokens are skipped.
        out: `[B, Hkv, G, N]` fp32; the first `ceil(seq_len / block_size)` entries of rows that are not skipped are
            written.
        block_max: as out, with its strides: gets the largest score of each block's tokens, in nats; optional.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_choice("bits", bits, BITS)
    check_block_mass(q, k_pool, page_table, seq_lens, page_size, block_size, out, block_max)
    check_thumbnails(codes, low_step, k_pool, bits, page_size, codes.shape[0])
    run = _block_mass_thumbnail_triton if use_triton(impl, q) else block_mass_thumbnail_reference
    run(
        q,
        k_pool,
        codes,
        low_step,
        page_table,
        seq_lens,
        bits=bits,
        scale=scale,
        page_size=page_size,
        block_size=block_size,
        min_context=min_context,
        out=out,
        block_max=block_max,
    )
