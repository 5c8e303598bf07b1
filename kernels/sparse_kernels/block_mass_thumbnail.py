"""Log mass of every block, estimated from thumbnails."""

import torch
import triton
import triton.language as tl

from . import _bfloat16_bits as bfloat16_bits
from . import _score_tile as score_tile
from . import _work_split as work_split
from ._checks import check_block_mass, check_choice
from ._dispatch import INTERPRETED, planned_programs, use_triton
from ._reference import block_logsumexp, rows_to_score, write_open_page
from .thumbnail import BITS, check_thumbnails, unpack_codes


PROGRAMS = 8
STAGES = 2
WARPS = 2


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
) -> None:
    """Torch reference of `block_mass_thumbnail`."""
    head_dim = q.shape[2]
    for row in rows_to_score(q, k_pool, page_table, seq_lens, page_size, min_context):
        write_open_page(row, scale, block_size, out)
        if row.closed == 0:
            continue
        pages = row.pages[: row.closed]
        low, step = low_step[pages].float().unsqueeze(2).unbind(3)  # [pages, Hkv, 1, D]
        levels = unpack_codes(codes[pages], bits, head_dim).float()  # [pages, Hkv, page_size, D]
        scores = torch.matmul(row.q * step, levels.transpose(2, 3)) + (row.q * low).sum(3, keepdim=True)
        mass = block_logsumexp(scores.permute(1, 2, 0, 3).flatten(2) * scale, block_size)
        out[row.index, :, :, : mass.shape[2]] = mass


@triton.jit
def _fold(query, bounds, START: tl.constexpr, WIDTH, FACTOR: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """A sub-range of a row's query with a page's steps folded in, and what it adds to the scores besides the product with the codes.

    Returns `query * step / FACTOR` and the bias, both `[ROWS, GROUP]`.
    """
    channels = tl.arange(0, query.shape[0])
    low = bfloat16_bits.to_float(tl.load(bounds + START + channels, mask=channels < WIDTH, other=0))
    step = bfloat16_bits.to_float(tl.load(bounds + D + START + channels, mask=channels < WIDTH, other=0))
    query = query.to(tl.float32)
    folded = query * (step * (1.0 / FACTOR))[:, None]
    bias = query * low[:, None]
    if HALF:
        # Codes go into the product as 128 + code (see `_levels`); the rounded query is what must be taken off again.
        rounded = folded.to(tl.bfloat16)
        return rounded, bias - 128.0 * rounded.to(tl.float32)
    else:
        return folded, bias


@triton.jit
def _levels(codes, high, S: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, HALF: tl.constexpr):
    """Sub-range S of the codes of packed bytes: `FACTOR * code`, fp32, or `128 + FACTOR * code` as bfloat16 when HALF.

    Masking a field where it lies multiplies its code by a power of two, the factor. `0x4300 | x` is the bfloat16 of `128 + x` for
    `x < 128`: no conversion instruction, which would cost more than the load. Fields above bit 6 are shifted down first.
    """
    if BITS == 4:
        fields = (codes & 0xF) if S == 0 else ((codes >> 1) & 0x78)
    else:
        fields = ((codes >> 2) & 0x30) if S == 3 else (codes & (3 << (2 * S)))
        if BITS == 3:
            # Byte i of the high plane holds channel i + s * D / 8 at bit s: two of its bits for each sub-range.
            second = (tl.arange(0, codes.shape[1]) >= BYTES // 2).to(high.dtype)[None, :]
            SHIFT: tl.constexpr = 6 if S == 3 else 2 * S + 2
            fields |= ((high >> (2 * S + second)) & 1) << SHIFT
    if HALF:
        return (fields | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        return fields.to(tl.float32)


@triton.jit(do_not_specialize=["batch", "min_context"])
def _block_mass_thumbnail_kernel(
    q,
    k_pool,
    codes,
    low_step,
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
    REQUESTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    unit, end = work_split.program_share(seq_lens, batch, kv_heads, min_context, PAGE, 1, REQUESTS)
    SUBS: tl.constexpr = 2 if BITS == 4 else 4
    BYTES: tl.constexpr = D // SUBS
    # Factors of `_levels`.
    F1: tl.constexpr = 8 if BITS == 4 else 4
    F2: tl.constexpr = 16
    F3: tl.constexpr = 16
    tokens = tl.arange(0, PAGE)[:, None]
    columns = tl.arange(0, SUB_ROWS)[None, :]
    while unit < end:
        b, before = work_split.find_request(unit, seq_lens, batch, kv_heads, min_context, PAGE, 1, REQUESTS)
        length = tl.load(seq_lens + b)
        row_pages = tl.cdiv(length, PAGE)
        h = (unit - before) // row_pages
        first = (unit - before) % row_pages
        last = tl.minimum(row_pages, first + end - unit)
        closed = length // PAGE
        pages = page_table + b.to(tl.int64) * page_table_stride
        out_row = out + b.to(tl.int64) * out_batch_stride + h.to(tl.int64) * out_head_stride
        q0 = score_tile.load_query(q, q_batch_stride, q_head_stride, b, h, 0, BYTES, G, SUB_ROWS, GROUP)
        q1 = score_tile.load_query(q, q_batch_stride, q_head_stride, b, h, BYTES, BYTES, G, SUB_ROWS, GROUP)
        if SUBS == 4:
            q2 = score_tile.load_query(q, q_batch_stride, q_head_stride, b, h, 2 * BYTES, BYTES, G, SUB_ROWS, GROUP)
            q3 = score_tile.load_query(q, q_batch_stride, q_head_stride, b, h, 3 * BYTES, BYTES, G, SUB_ROWS, GROUP)
        for page in tl.range(first, tl.minimum(last, closed), num_stages=STAGES):
            summary = tl.load(pages + page).to(tl.int64) * kv_heads + h
            bytes = codes + (summary * PAGE + tokens) * (D * BITS // 8)
            packed = tl.load(bytes + columns, mask=columns < BYTES, other=0)
            high = packed
            if BITS == 3:
                high_columns = tl.where(columns >= BYTES // 2, columns - BYTES // 2, columns)
                high = tl.load(bytes + BYTES + high_columns, mask=columns < BYTES, other=0)
            packed = packed.to(tl.int16 if HALF else tl.int32)
            high = high.to(tl.int16 if HALF else tl.int32)
            bounds = low_step + summary * (2 * D)
            f0, bias = _fold(q0, bounds, 0, BYTES, 1, D, HALF)
            scores = tl.dot(_levels(packed, high, 0, BITS, BYTES, HALF), f0, input_precision="ieee")
            f1, part = _fold(q1, bounds, BYTES, BYTES, F1, D, HALF)
            bias += part
            scores = tl.dot(_levels(packed, high, 1, BITS, BYTES, HALF), f1, scores, input_precision="ieee")
            if SUBS == 4:
                f2, part = _fold(q2, bounds, 2 * BYTES, BYTES, F2, D, HALF)
                bias += part
                scores = tl.dot(_levels(packed, high, 2, BITS, BYTES, HALF), f2, scores, input_precision="ieee")
                f3, part = _fold(q3, bounds, 3 * BYTES, BYTES, F3, D, HALF)
                bias += part
                scores = tl.dot(_levels(packed, high, 3, BITS, BYTES, HALF), f3, scores, input_precision="ieee")
            scores = (scores + tl.sum(bias, 0)[None, :]) * scale_log2
            mass = score_tile.block_log_mass(scores, BLOCK)
            score_tile.store_blocks(out_row, out_group_stride, mass, page * (PAGE // BLOCK), closed * (PAGE // BLOCK), G)
        if last > closed:
            score_tile.write_open_page(
                score_tile.load_query(q, q_batch_stride, q_head_stride, b, h, 0, D, G, ROWS, GROUP),
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
) -> None:
    batch, kv_heads, group_size, _ = out.shape
    head_dim = q.shape[2]
    _block_mass_thumbnail_kernel[(planned_programs(q, PROGRAMS),)](
        q,
        k_pool,
        codes,
        low_step.view(torch.int16),
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
        batch,
        kv_heads,
        min_context,
        BITS=bits,
        HALF=q.dtype != torch.float32 and not INTERPRETED,
        G=group_size,
        GROUP=score_tile.padded_group(group_size),
        D=head_dim,
        ROWS=triton.next_power_of_2(head_dim),
        SUB_ROWS=triton.next_power_of_2(head_dim // (2 if bits == 4 else 4)),
        PAGE=page_size,
        BLOCK=block_size,
        T=score_tile.token_tile(page_size, head_dim, q.dtype),
        REQUESTS=score_tile.REQUESTS,
        STAGES=STAGES,
        num_warps=WARPS,
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
    impl: str = "auto",
) -> None:
    """Writes the log mass of the closed pages' blocks from their thumbnails, and the exact one of the open page's blocks.

    `log sum_t exp(scale * (q . low + (q * step) . code_t))` over the tokens of each block. The step is folded into the query once
    for each page, so that codes go into the product as they are.

    Args:
        q: `[B, Hkv * G, D]`, pool dtype, G from 1 to 16.
        k_pool: `[P * page_size, Hkv, D]` fp16, bf16 or fp32; read for the open pages only.
        codes: `[P, Hkv, page_size, D * bits // 8]` uint8, as `thumbnail` writes it.
        low_step: `[P, Hkv, 2, D]` bfloat16, as `thumbnail` writes it.
        page_table: `[>=B, max_pages]` int32; only the first `ceil(seq_len / page_size)` entries of a row are read.
        seq_lens: `[>=B]` int32, in tokens; 0 for padded rows.
        bits: 2, 3 or 4.
        scale: factor of the scores.
        page_size: tokens in a page.
        block_size: tokens in a block; divides `page_size`.
        min_context: rows with fewer tokens are skipped.
        out: `[B, Hkv, G, N]` fp32; the first `ceil(seq_len / block_size)` entries of rows that are not skipped are written.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_choice("bits", bits, BITS)
    check_block_mass(q, k_pool, page_table, seq_lens, page_size, block_size, out)
    check_thumbnails(codes, low_step, k_pool, bits, page_size)
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
    )
