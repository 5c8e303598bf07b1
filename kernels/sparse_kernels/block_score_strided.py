"""Score of every block from means of overlapping windows of keys: SparDA's and InfLLM v2's summaries, max-pooled.

A window is 32 keys, windows start 16 keys apart. What is kept are the means of 16 keys, which belong to one page each:
a window's mean is that of two neighbours, its score the mean of theirs. So a page's summary depends on its own keys
alone, and windows that cross from page to page are put together while scoring.
"""

import torch
import triton
import triton.language as tl

from . import _score_tile as score_tile
from . import _work_split as work_split
from ._checks import (
    HEAD_DIMS,
    KV_DTYPES,
    MAX_GROUP_SIZE,
    check_choice,
    check_contiguous,
    check_dtype,
    check_inner_contiguous,
    check_rows,
    check_shape,
    check_sizes,
)
from ._dispatch import planned_programs, use_triton

STRIDE = 16
"""Keys from one window's start to the next; a window is two of them."""


def block_score_strided_reference(
    q: torch.Tensor,
    means: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
) -> None:
    """Torch reference of `block_score_strided`."""
    batch, kv_heads, group_size, _ = out.shape
    per_block = block_size // STRIDE
    for b, length in enumerate(seq_lens[:batch].tolist()):
        if length == 0 or length < min_context:
            continue
        closed = length // page_size
        row = out[b, :, :, : -(-length // block_size)]
        row[:, :, closed * page_size // block_size :] = float("-inf")
        if closed == 0:
            continue
        # [Hkv, D, means]
        kept = means[page_table[b, :closed].long(), :, :, 0].float().permute(1, 3, 0, 2).flatten(2)
        query = q[b].view(kv_heads, group_size, -1).float()
        scores = torch.matmul(query, kept) * scale
        scores = torch.where(scores.isnan(), float("inf"), scores)
        # Window w is means w and w + 1; those of a block are its own and the one that reaches into it.
        windows = (scores[..., :-1] + scores[..., 1:]) / 2
        windows = torch.nn.functional.pad(windows, (1, 1), value=float("-inf"))
        pooled = windows.unfold(-1, per_block + 1, per_block).amax(-1)
        row[:, :, : pooled.shape[-1]] = pooled


@triton.jit
def _mean_scores(
    query,
    means,
    pages,
    index,
    count,
    h,
    kv_heads,
    D: tl.constexpr,
    PER_PAGE: tl.constexpr,
):
    """Scores `[T, GROUP]` of the means `index` (`[T, 1]`) of a row; -inf for those that are not below `count`, +inf for
    what is no number. `query` is `[ROWS, GROUP]`."""
    channels = tl.arange(0, query.shape[0])[None, :]
    present = (index >= 0) & (index < count)
    page = tl.load(pages + index // PER_PAGE, mask=present, other=0).to(tl.int64)
    rows = means + ((page * kv_heads + h) * PER_PAGE + index % PER_PAGE) * D
    tile = tl.load(rows + channels, mask=present & (channels < D), other=0.0)
    scores = tl.dot(tile, query, input_precision="ieee")
    scores = tl.where(scores == scores, scores, float("inf"))
    return tl.where(present, scores, float("-inf"))


@triton.jit(do_not_specialize=["batch", "min_context"])
def _block_score_strided_kernel(
    q,
    means,
    page_table,
    seq_lens,
    out,
    q_batch_stride,
    q_head_stride,
    page_table_stride,
    out_batch_stride,
    out_head_stride,
    out_group_stride,
    half_scale,
    batch,
    kv_heads,
    min_context,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    unit, end, h = work_split.program_share(seq_lens, batch, kv_heads, min_context, PAGE, TILE_PAGES, REQUESTS)
    PER_PAGE: tl.constexpr = PAGE // STRIDE
    PER_BLOCK: tl.constexpr = BLOCK // STRIDE
    TILE: tl.constexpr = TILE_PAGES * PER_PAGE
    TILE_BLOCKS: tl.constexpr = TILE // PER_BLOCK
    while unit < end:
        b, before = work_split.find_request(unit, seq_lens, batch, min_context, PAGE, TILE_PAGES, REQUESTS)
        length = tl.load(seq_lens + b)
        units = work_split.row_units(length, min_context, PAGE, TILE_PAGES)
        first = unit - before
        last = tl.minimum(units, first + end - unit)
        closed = length // PAGE
        count = closed * PER_PAGE
        closed_tiles = tl.cdiv(closed, TILE_PAGES)
        query = score_tile.load_query(q, q_batch_stride, q_head_stride, b, h, D, G, ROWS, GROUP)
        pages = page_table + b.to(tl.int64) * page_table_stride
        out_row = out + b.to(tl.int64) * out_batch_stride + h.to(tl.int64) * out_head_stride
        for tile in range(first, tl.minimum(last, closed_tiles)):
            index = tile * TILE + tl.arange(0, TILE)[:, None]
            own = _mean_scores(query, means, pages, index, count, h, kv_heads, D, PER_PAGE)
            # Rows that the tile has loaded or the next one will: they come from the caches.
            left = _mean_scores(query, means, pages, index - 1, count, h, kv_heads, D, PER_PAGE)
            right = _mean_scores(query, means, pages, index + 1, count, h, kv_heads, D, PER_PAGE)
            # What has no neighbour is in no window.
            near = tl.maximum(left, right)
            best = tl.where(near == float("-inf"), near, (own + near) * half_scale)
            if PER_BLOCK > 1:
                best = tl.max(tl.reshape(best, (TILE_BLOCKS, PER_BLOCK, GROUP)), 1)
            score_tile.store_blocks(out_row, out_group_stride, best, tile * TILE_BLOCKS, count // PER_BLOCK, G)
        if last > closed_tiles:
            open_blocks: tl.constexpr = PAGE // BLOCK
            missing = tl.full((open_blocks, GROUP), float("-inf"), tl.float32)
            store_from = closed * open_blocks
            score_tile.store_blocks(out_row, out_group_stride, missing, store_from, tl.cdiv(length, BLOCK), G)
        unit += last - first


def _block_score_strided_triton(
    q: torch.Tensor,
    means: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
) -> None:
    batch, kv_heads, group_size, _ = out.shape
    head_dim = q.shape[2]
    _block_score_strided_kernel[(planned_programs(q, 4, kv_heads),)](
        q,
        means,
        page_table,
        seq_lens,
        out,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        out.stride(0),
        out.stride(1),
        out.stride(2),
        scale / 2,
        batch,
        kv_heads,
        min_context,
        G=group_size,
        GROUP=score_tile.padded_group(group_size),
        D=head_dim,
        ROWS=triton.next_power_of_2(head_dim),
        PAGE=page_size,
        BLOCK=block_size,
        STRIDE=STRIDE,
        TILE_PAGES=max(1, 512 // page_size),
        REQUESTS=score_tile.REQUESTS,
        num_warps=4,
    )


def block_score_strided(
    q: torch.Tensor,
    means: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Writes a score for each block of closed pages: the largest `scale * q . mean` of the windows that overlap it.

    A window is 32 keys from a multiple of 16 on, all of them in closed pages. Blocks of the open page, which rules
    always keep, and a row's only block if no window fits get -inf. A score that is no number is +inf, with which rules
    keep the whole row.

    Args:
        q: `[B, Hkv * G, D]`, G from 1 to 16: what scores, queries or forecasts of them.
        means: `[P, Hkv, page_size // 16, 1, D]`, q's dtype, as `block_statistics` of kind `mean` writes them for
            blocks of 16.
        page_table: `[>=B, max_pages]` int32; only the first `seq_len // page_size` entries of a row are read.
        seq_lens: `[>=B]` int32, in tokens; 0 for padded rows.
        scale: factor of the scores; positive.
        page_size: tokens in a page.
        block_size: tokens in a block: 16, 32 or 64; divides `page_size`.
        min_context: rows with fewer tokens are skipped.
        out: `[B, Hkv, G, N]` fp32; the first `ceil(seq_len / block_size)` entries of rows that are not skipped are
            written.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_sizes(page_size, block_size)
    if block_size % STRIDE:
        raise ValueError(f"block_size is {block_size}; needed: a multiple of {STRIDE}")
    check_shape("out", out, None, None, None, None)
    check_dtype("out", out, torch.float32)
    check_inner_contiguous("out", out)
    batch, kv_heads, group_size, _ = out.shape
    if not 1 <= group_size <= MAX_GROUP_SIZE:
        raise ValueError(f"out has {group_size} vectors for each KV head; needed: 1 to {MAX_GROUP_SIZE}")
    check_shape("q", q, batch, kv_heads * group_size, None)
    check_choice("head dimension of q", q.shape[2], HEAD_DIMS)
    check_dtype("q", q, *KV_DTYPES)
    check_inner_contiguous("q", q)
    check_shape("means", means, None, kv_heads, page_size // STRIDE, 1, q.shape[2])
    check_dtype("means", means, q.dtype)
    check_contiguous("means", means)
    check_rows("page_table", page_table, batch, ndim=2)
    check_dtype("page_table", page_table, torch.int32)
    check_inner_contiguous("page_table", page_table)
    check_rows("seq_lens", seq_lens, batch)
    check_dtype("seq_lens", seq_lens, torch.int32)
    run = _block_score_strided_triton if use_triton(impl, q) else block_score_strided_reference
    run(
        q,
        means,
        page_table,
        seq_lens,
        scale=scale,
        page_size=page_size,
        block_size=block_size,
        min_context=min_context,
        out=out,
    )
