"""Log mass of every block, estimated from block statistics."""

import math

import torch
import triton
import triton.language as tl

from . import _score_tile as score_tile
from . import _work_split as work_split
from ._checks import check_block_mass, check_choice, check_contiguous, check_dtype, check_shape
from ._dispatch import planned_programs, use_triton
from ._reference import rows_to_score, write_open_page
from .block_statistics import KINDS, STATISTICS_OF_KIND


def block_mass_statistics_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    statistics: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kind: str,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
) -> None:
    """Torch reference of `block_mass_statistics`."""
    for row in rows_to_score(q, k_pool, page_table, seq_lens, page_size, min_context):
        write_open_page(row, scale, block_size, out)
        if row.closed == 0:
            continue
        # [S, Hkv, D, blocks]
        parts = statistics[row.pages[: row.closed]].permute(3, 1, 4, 0, 2).flatten(3).float()
        if kind == "minmax":
            scores = torch.matmul(row.q.clamp(max=0), parts[0]) + torch.matmul(row.q.clamp(min=0), parts[1])
        else:
            scores = torch.matmul(row.q, parts[0])
        mass = scores * scale + math.log(block_size)
        if kind == "mean-variance":
            mass += torch.matmul((row.q * scale).square() * 0.5, parts[1])
        out[row.index, :, :, : mass.shape[2]] = mass


@triton.jit
def _load_statistic(rows, index, present, D: tl.constexpr, ROWS: tl.constexpr):
    """Statistic `index` of the blocks at `rows [T, 1]`: `[T, ROWS]`."""
    channels = tl.arange(0, ROWS)[None, :]
    return tl.load(rows + index * D + channels, mask=present & (channels < D), other=0.0)


@triton.jit(do_not_specialize=["batch", "min_context"])
def _block_mass_statistics_kernel(
    q,
    k_pool,
    statistics,
    page_table,
    seq_lens,
    out,
    q_batch_stride,
    q_head_stride,
    slot_stride,
    head_stride,
    page_table_stride,
    out_batch_stride,
    out_head_stride,
    out_group_stride,
    scale_log2,
    log_block,
    batch,
    kv_heads,
    min_context,
    KIND: tl.constexpr,
    S: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    T: tl.constexpr,
    REQUESTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    unit, end, h = work_split.program_share(seq_lens, batch, kv_heads, min_context, PAGE, TILE_PAGES, REQUESTS)
    BLOCKS: tl.constexpr = PAGE // BLOCK
    TILE_BLOCKS: tl.constexpr = TILE_PAGES * BLOCKS
    scale = scale_log2 * score_tile.LN_2
    # TF32 keeps fp16's precision over fp32's range: squared queries and variances may leave fp16's.
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    while unit < end:
        b, before = work_split.find_request(unit, seq_lens, batch, min_context, PAGE, TILE_PAGES, REQUESTS)
        length = tl.load(seq_lens + b)
        units = work_split.row_units(length, min_context, PAGE, TILE_PAGES)
        first = unit - before
        last = tl.minimum(units, first + end - unit)
        closed = length // PAGE * BLOCKS
        closed_tiles = tl.cdiv(closed, TILE_BLOCKS)
        query = score_tile.load_query(q, q_batch_stride, q_head_stride, b, h, D, G, ROWS, GROUP)
        pages = page_table + b.to(tl.int64) * page_table_stride
        out_row = out + b.to(tl.int64) * out_batch_stride + h.to(tl.int64) * out_head_stride
        for tile in tl.range(first, tl.minimum(last, closed_tiles), num_stages=STAGES):
            blocks = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)[:, None]
            present = blocks < closed
            page = tl.load(pages + blocks // BLOCKS, mask=present, other=0).to(tl.int64)
            rows = statistics + ((page * kv_heads + h) * BLOCKS + blocks % BLOCKS) * (S * D)
            center = _load_statistic(rows, 0, present, D, ROWS)
            if KIND == "minmax":
                highest = _load_statistic(rows, 1, present, D, ROWS)
                scores = tl.dot(center, tl.where(query < 0, query, 0.0).to(query.dtype), input_precision="ieee")
                scores = tl.dot(
                    highest, tl.where(query > 0, query, 0.0).to(query.dtype), scores, input_precision="ieee"
                )
            else:
                scores = tl.dot(center, query, input_precision="ieee")
            mass = scores * scale + log_block
            if KIND == "mean-variance":
                variance = _load_statistic(rows, 1, present, D, ROWS).to(tl.float32)
                scaled = query.to(tl.float32) * scale
                mass += tl.dot(variance, scaled * scaled * 0.5, input_precision=PRECISION)
            score_tile.store_blocks(out_row, out_group_stride, mass, tile * TILE_BLOCKS, closed, G)
        if last > closed_tiles:
            score_tile.write_open_page(
                query,
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
            )
        unit += last - first


def _block_mass_statistics_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    statistics: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kind: str,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
) -> None:
    batch, kv_heads, group_size, _ = out.shape
    head_dim = q.shape[2]
    _block_mass_statistics_kernel[(planned_programs(q, 4, kv_heads),)](
        q,
        k_pool,
        statistics,
        page_table,
        seq_lens,
        out,
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        page_table.stride(0),
        out.stride(0),
        out.stride(1),
        out.stride(2),
        scale * score_tile.LOG2_E.value,
        math.log(block_size),
        batch,
        kv_heads,
        min_context,
        KIND=kind,
        S=STATISTICS_OF_KIND[kind],
        G=group_size,
        GROUP=score_tile.padded_group(group_size),
        D=head_dim,
        ROWS=triton.next_power_of_2(head_dim),
        PAGE=page_size,
        BLOCK=block_size,
        TILE_PAGES=32 * block_size // page_size,
        T=score_tile.token_tile(page_size, head_dim, q.dtype),
        REQUESTS=score_tile.REQUESTS,
        STAGES=2,
        num_warps=4,
    )


def block_mass_statistics(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    statistics: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kind: str,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Writes the estimated log mass of the closed pages' blocks, and the exact one of the open page's blocks.

    With `n = block_size`, and sums over channels `d`:

    - `mean`: `log n + scale * q . mean`, a lower bound (Jensen);
    - `mean-variance`: adds `scale**2 / 2 * sum q_d**2 * variance_d`, the mass of normally distributed keys (MOIRA's
      `mvar`);
    - `minmax`: `log n + scale * sum max(q_d * min_d, q_d * max_d)`, an upper bound (Quest).

    Args:
        q: `[B, Hkv * G, D]`, pool dtype, G from 1 to 16.
        k_pool: `[P * page_size, Hkv, D]` fp16, bf16 or fp32; read for the open pages only.
        statistics: `[P, Hkv, page_size // block_size, S, D]`, pool dtype, as `block_statistics` writes it.
        page_table: `[>=B, max_pages]` int32; only the first `ceil(seq_len / page_size)` entries of a row are read.
        seq_lens: `[>=B]` int32, in tokens; 0 for padded rows.
        kind: `mean`, `mean-variance` or `minmax`.
        scale: factor of the scores; positive.
        page_size: tokens in a page.
        block_size: tokens in a block; divides `page_size`.
        min_context: rows with fewer tokens are skipped.
        out: `[B, Hkv, G, N]` fp32; the first `ceil(seq_len / block_size)` entries of rows that are not skipped are
            written.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype, size or kind is not as above.
    """
    check_choice("kind", kind, KINDS)
    check_block_mass(q, k_pool, page_table, seq_lens, page_size, block_size, out)
    slots, kv_heads, head_dim = k_pool.shape
    check_shape(
        "statistics",
        statistics,
        slots // page_size,
        kv_heads,
        page_size // block_size,
        STATISTICS_OF_KIND[kind],
        head_dim,
    )
    check_dtype("statistics", statistics, k_pool.dtype)
    check_contiguous("statistics", statistics)
    run = _block_mass_statistics_triton if use_triton(impl, q) else block_mass_statistics_reference
    run(
        q,
        k_pool,
        statistics,
        page_table,
        seq_lens,
        kind=kind,
        scale=scale,
        page_size=page_size,
        block_size=block_size,
        min_context=min_context,
        out=out,
    )
