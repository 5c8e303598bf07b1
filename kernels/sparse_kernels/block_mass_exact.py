"""Log mass of every block, from the keys themselves: the oracle that estimators approximate."""

import torch
import triton
import triton.language as tl

from . import _score_tile as score_tile
from . import _work_split as work_split
from ._checks import check_block_mass
from ._dispatch import planned_programs, use_triton
from ._reference import block_logsumexp, block_maximum, rows_to_score, token_scores


def block_mass_exact_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
    block_max: torch.Tensor | None = None,
) -> None:
    """Torch reference of `block_mass_exact`."""
    for row in rows_to_score(q, k_pool, page_table, seq_lens, page_size, min_context):
        scores = token_scores(row.q, row.keys(0, row.length), scale)
        mass = block_logsumexp(scores, block_size)
        out[row.index, :, :, : mass.shape[2]] = mass
        if block_max is not None:
            block_max[row.index, :, :, : mass.shape[2]] = block_maximum(scores, block_size)


@triton.jit(do_not_specialize=["batch", "min_context"])
def _block_mass_exact_kernel(
    q,
    k_pool,
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
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
    REQUESTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    unit, end, h = work_split.program_share(seq_lens, batch, kv_heads, min_context, PAGE, 1, REQUESTS)
    TILES: tl.constexpr = PAGE // T
    while unit < end:
        b, before = work_split.find_request(unit, seq_lens, batch, min_context, PAGE, 1, REQUESTS)
        length = tl.load(seq_lens + b)
        row_pages = tl.cdiv(length, PAGE)
        first = unit - before
        last = tl.minimum(row_pages, first + end - unit)
        query = score_tile.load_query(q, q_batch_stride, q_head_stride, b, h, D, G, ROWS, GROUP)
        pages = page_table + b.to(tl.int64) * page_table_stride
        out_row = out + b.to(tl.int64) * out_batch_stride + h.to(tl.int64) * out_head_stride
        max_row = block_max
        if block_max is not None:
            max_row = block_max + b.to(tl.int64) * out_batch_stride + h.to(tl.int64) * out_head_stride
        keys = k_pool + h * head_stride
        for tile in tl.range(first * TILES, tl.minimum(last * TILES, tl.cdiv(length, T)), num_stages=STAGES):
            slot = tl.load(pages + tile // TILES).to(tl.int64) * PAGE + tile % TILES * T
            scores = score_tile.exact_tile(query, keys, slot_stride, slot, length - tile * T, scale_log2, T, D)
            mass = score_tile.block_log_mass(scores, BLOCK)
            score_tile.store_blocks(out_row, out_group_stride, mass, tile * (T // BLOCK), tl.cdiv(length, BLOCK), G)
            if block_max is not None:
                maxima = score_tile.block_maximum(scores, BLOCK)
                score_tile.store_blocks(
                    max_row, out_group_stride, maxima, tile * (T // BLOCK), tl.cdiv(length, BLOCK), G
                )
        unit += last - first


def _block_mass_exact_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
    block_max: torch.Tensor | None = None,
) -> None:
    batch, kv_heads, group_size, _ = out.shape
    head_dim = q.shape[2]
    _block_mass_exact_kernel[(planned_programs(q, 4, kv_heads),)](
        q,
        k_pool,
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
        G=group_size,
        GROUP=score_tile.padded_group(group_size),
        D=head_dim,
        ROWS=triton.next_power_of_2(head_dim),
        PAGE=page_size,
        BLOCK=block_size,
        T=score_tile.token_tile(page_size, head_dim, q.dtype),
        REQUESTS=score_tile.REQUESTS,
        STAGES=2,
        num_warps=4,
    )


def block_mass_exact(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    page_size: int,
    block_size: int,
    min_context: int,
    out: torch.Tensor,
    block_max: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Writes `log sum_t exp(q . k_t * scale)` over the tokens of each block.

    Here and in the other block-mass operations, a block whose mass is more than `exp(87)` times below that of a token
    of the same page may get -inf.

    Args:
        q: `[B, Hkv * G, D]`, pool dtype, G from 1 to 16.
        k_pool: `[P * page_size, Hkv, D]` fp16, bf16 or fp32; the token of this step included.
        page_table: `[>=B, max_pages]` int32; only the first `ceil(seq_len / page_size)` entries of a row are read.
        seq_lens: `[>=B]` int32, in tokens; 0 for padded rows.
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
    check_block_mass(q, k_pool, page_table, seq_lens, page_size, block_size, out, block_max)
    run = _block_mass_exact_triton if use_triton(impl, q) else block_mass_exact_reference
    run(
        q,
        k_pool,
        page_table,
        seq_lens,
        scale=scale,
        page_size=page_size,
        block_size=block_size,
        min_context=min_context,
        out=out,
        block_max=block_max,
    )
