"""The kernel of `fused_top_delta`, and how it is launched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _fused_attend as fused_attend
from . import _fused_plan as plan
from . import _fused_scan as fused_scan
from . import _fused_shares as fused_shares
from . import _score_tile as score_tile
from . import _work_split as work_split
from ._dispatch import INTERPRETED
from ._fused_combine import combine_parts
from ._fused_plan import FusedConfig, FusedWorkspace
from .pseudo_maximum import forced_range, forced_tile, row_maximum
from .selection_tap import TapPoint, tap_arguments
from .top_delta_rule import least_score

TAIL_CELLS = 32
"""Cells of the tail that are worked on together."""


@triton.jit(do_not_specialize=["batch", "sink_blocks", "window_tokens", "min_context", "layer", "first_row"])
def _fused_top_delta_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    codes,
    low_step,
    means_ptr,
    page_table,
    seq_lens,
    deltas,
    out_ptr,
    lse_ptr,
    block_counts,
    kept_total,
    last_kept,
    spans,
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    partial_counts,
    notes_ptr,
    kept_bits_ptr,
    slots_ptr,
    dropped_ptr,
    tap_source,
    tap_target,
    tap_q,
    tap_lists,
    tap_counts,
    tap_seq_len,
    layer,
    first_row,
    tap_batch_stride,
    tap_head_stride,
    tap_capacity,
    scale_log2,
    q_stride_b,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    page_table_stride,
    out_stride_b,
    out_stride_h,
    counts_stride_b,
    counts_stride_h,
    deltas_stride_b,
    deltas_stride_h,
    dropped_size,
    batch,
    kv_heads,
    sink_blocks,
    window_tokens,
    min_context,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SUB_ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    FORCED_TILE: tl.constexpr,
    CELLS: tl.constexpr,
    TILE_CELLS: tl.constexpr,
    Q_CHUNK: tl.constexpr,
    REQUESTS: tl.constexpr,
    PAGE_WEIGHT: tl.constexpr,
    KEPT_WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Where the pages are weighted, what is counted is cost, and a program may have several heads, unless rows are
    # aligned: then it has pages of one row, and what is counted is these.
    if last_kept is None:
        unit, end, h = work_split.program_share(seq_lens, batch, kv_heads, 0, PAGE, 1, REQUESTS)
        program = h * (tl.num_programs(0) // kv_heads) + tl.program_id(0) // kv_heads
    else:
        program = tl.program_id(0) % kv_heads * (tl.num_programs(0) // kv_heads) + tl.program_id(0) // kv_heads
        if ALIGNED:
            request, h, first, end = fused_shares.aligned_range(
                program, seq_lens, last_kept, batch, kv_heads, PAGE, BLOCK, PAGE_WEIGHT, KEPT_WEIGHT, REQUESTS
            )
            unit = first
        else:
            unit, end = fused_shares.program_range(
                program, seq_lens, last_kept, batch, kv_heads, PAGE, BLOCK, PAGE_WEIGHT, KEPT_WEIGHT, REQUESTS
            )
    notes = notes_ptr + program * CHUNK
    kept_bits = kept_bits_ptr + program * CHUNK
    slots = slots_ptr + program * (CHUNK * (PAGE // BLOCK))
    dropped = dropped_ptr + program * dropped_size
    heads = tl.arange(0, GROUP)
    channels = tl.arange(0, D_PAD)
    real = (channels < D)[:, None] & (heads < G)[None, :]
    while unit < end:
        if last_kept is None:
            request, before = work_split.find_request(unit, seq_lens, batch, 0, PAGE, 1, REQUESTS)
        elif not ALIGNED:
            request, h, before, weight = fused_shares.find_row(
                unit, seq_lens, last_kept, batch, kv_heads, PAGE, BLOCK, PAGE_WEIGHT, KEPT_WEIGHT, REQUESTS
            )
        b = request.to(tl.int64)
        length = tl.load(seq_lens + b)
        row_pages = tl.cdiv(length, PAGE)
        if last_kept is None:
            first = unit - before
            last = tl.minimum(row_pages, first + end - unit)
        else:
            if ALIGNED:
                last = end
                unit = end
            else:
                first = tl.cdiv(tl.maximum(unit - before, 0), weight)
                last = tl.minimum(row_pages, tl.cdiv(end - before, weight))
                unit = before + last * weight
            span = spans + 2 * (b * kv_heads + h)
            if first == 0:
                tl.store(span, program)
            if last == row_pages:
                tl.store(span + 1, program)
        pages = page_table + b * page_table_stride
        row_q = q_ptr + b * q_stride_b + h * G * q_stride_h
        keys = k_ptr + h * k_stride_h
        delta = tl.load(deltas + b * deltas_stride_b + h * deltas_stride_h)
        # A missing number is not below infinity.
        tests = (length >= min_context) & (delta < float("inf"))
        sink, tail = forced_range(length, sink_blocks, window_tokens, PAGE, BLOCK)
        least = tl.full((GROUP,), float("-inf"), tl.float32)
        relative = tl.zeros((GROUP,), tl.float32)
        if tests:
            query = score_tile.load_query(q_ptr, q_stride_b, q_stride_h, b, h, D, G, D_PAD, GROUP)
            top = row_maximum(
                query, keys, k_stride_t, pages, length, sink, tail, scale_log2, FORCED_TILE, D, PAGE, BLOCK, STAGES
            )
            least = least_score(top, delta * score_tile.LOG2_E)
            relative = tl.where(top - top == 0, top, 0.0)
        # The row's last block may be short; -1 is no slot.
        last_block = (length - 1) // BLOCK
        partial_tokens = length - last_block * BLOCK
        partial_slot = tl.load(pages + row_pages - 1) * PAGE + last_block % (PAGE // BLOCK) * BLOCK
        partial_slot = tl.where(partial_tokens < BLOCK, partial_slot, -1)

        is_whole = (first == 0) & (last == row_pages)
        # A row that ends here comes before one that starts here, so that whole rows can use the latter's part.
        part = 2 * program + (first == 0).to(tl.int32)
        parts = part * G + heads
        kept = tl.zeros((), tl.int32)
        for start in range(first, last, CHUNK):
            count = tl.minimum(last - start, CHUNK)
            # What other threads noted, or still read, of the chunk before.
            tl.debug_barrier()
            fused_scan.note_pages(
                notes, kept_bits, pages, start, count, length, sink, tail, not tests, CHUNK, PAGE, BLOCK
            )
            tl.debug_barrier()
            if tests:
                fused_scan.scan_pages(
                    row_q,
                    q_stride_h,
                    codes,
                    low_step,
                    notes,
                    kept_bits,
                    dropped,
                    count,
                    h,
                    kv_heads,
                    least,
                    relative,
                    scale_log2,
                    BITS,
                    HALF,
                    G,
                    GROUP,
                    D,
                    SUB_ROWS,
                    PAGE,
                    BLOCK,
                    CELLS,
                    STAGES,
                )
                tl.debug_barrier()
            kept_now = fused_scan.list_blocks(notes, kept_bits, slots, CHUNK, PAGE, BLOCK)
            tl.debug_barrier()
            kept += kept_now
            if tap_target is not None:  # noqa: SIM102 - a condition of the compiler's
                if (tl.load(tap_target) == layer) & (tl.load(tap_target + 1) == first_row + request):
                    fused_attend.fill_tap(
                        kept_bits,
                        start,
                        count,
                        kept_now,
                        row_pages,
                        tap_lists + h * tap_capacity,
                        tap_counts + h,
                        CHUNK,
                        PAGE,
                        BLOCK,
                    )
            # Between chunks the softmax is in the part: registers are for the scan.
            query = score_tile.load_query(q_ptr, q_stride_b, q_stride_h, b, h, D, G, D_PAD, GROUP)
            goes_on = (start > first) & (heads < G)
            highest = tl.load(partial_max_ptr + parts, mask=goes_on, other=float("-inf"))
            weight_sum = tl.load(partial_sum_ptr + parts, mask=goes_on, other=0.0)
            acc_ptr = partial_out_ptr + parts[None, :] * D + channels[:, None]
            acc = tl.load(acc_ptr, mask=real & (start > first), other=0.0)
            highest, weight_sum, acc = fused_attend.attend(
                highest,
                weight_sum,
                acc,
                query,
                slots,
                kept_now,
                partial_slot,
                partial_tokens,
                keys,
                v_ptr + h * v_stride_h,
                k_stride_t,
                v_stride_t,
                scale_log2,
                D,
                BLOCK,
                TILE,
                STAGES,
            )
            if CELLS:  # noqa: SIM102 - a condition of the compiler's
                if tests:
                    highest, weight_sum, acc = fused_attend.add_tail(
                        highest,
                        weight_sum,
                        acc,
                        notes,
                        dropped,
                        relative,
                        count,
                        h,
                        kv_heads,
                        means_ptr,
                        G,
                        D,
                        CELLS,
                        TILE_CELLS,
                    )

            if is_whole & (start + count == last):
                result = acc / tl.where(weight_sum > 0, weight_sum, 1.0)[None, :]
                target = out_ptr + b * out_stride_b + (h * G + heads)[None, :] * out_stride_h + channels[:, None]
                tl.store(target, result.to(out_ptr.dtype.element_ty), mask=real)
                if lse_ptr is not None:
                    row_lse = (highest + tl.log2(weight_sum)) * score_tile.LN_2
                    tl.store(lse_ptr + (b * kv_heads + h) * G + heads, row_lse, mask=heads < G)
            else:
                tl.store(acc_ptr, acc, mask=real)
                tl.store(partial_max_ptr + parts, highest, mask=heads < G)
                tl.store(partial_sum_ptr + parts, weight_sum, mask=heads < G)

        if is_whole:
            tl.store(block_counts + b * counts_stride_b + h * counts_stride_h, kept)
            if kept_total is not None:
                tl.atomic_add(kept_total + h, kept.to(tl.int64), sem="relaxed")
        else:
            tl.store(partial_counts + part, kept)
        if tap_target is not None:
            tapped = (tl.load(tap_target) == layer) & (tl.load(tap_target + 1) == first_row + request)
            if tapped & (first == 0):
                tl.store(tap_seq_len, length)
                index = tl.arange(0, Q_CHUNK)
                source = tap_source + b * tap_batch_stride + h * G * tap_head_stride
                values = tl.load(source + index // D * tap_head_stride + index % D, mask=index < G * D)
                tl.store(tap_q + h * G * D + index, values, mask=index < G * D)
        if last_kept is None:
            unit += last - first


def launch_fused_top_delta(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    delta: torch.Tensor,
    bits: int,
    scale: float,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    out: torch.Tensor,
    block_counts: torch.Tensor,
    workspace: FusedWorkspace,
    value_means: torch.Tensor | None,
    lse: torch.Tensor | None,
    kept_total: torch.Tensor | None,
    last_kept: torch.Tensor | None,
    tap: TapPoint | None,
    config: FusedConfig,
) -> None:
    batch, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    group_size = heads // kv_heads
    half = q.dtype != torch.float32 and not INTERPRETED
    parts = workspace.parts
    programs = workspace.num_programs // kv_heads * kv_heads
    # Sub-ranges of codes that a product takes at once; see `scan_pages`.
    subs = (8 if half else 4) if bits == 2 else 2 if bits == 4 and not half else 4
    _fused_top_delta_kernel[(programs,)](
        q,
        k_pool,
        v_pool,
        codes,
        low_step.view(torch.int16),
        value_means,
        page_table,
        seq_lens,
        delta,
        out,
        lse,
        block_counts,
        kept_total,
        last_kept,
        None if last_kept is None else workspace.spans,
        parts.partial_out,
        parts.partial_max,
        parts.partial_sum,
        workspace.counts,
        workspace.notes,
        workspace.kept_bits,
        workspace.slots,
        workspace.dropped,
        *tap_arguments(tap),
        page_table.shape[1] * (page_size // block_size),
        scale * score_tile.LOG2_E.value,
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        v_pool.stride(0),
        v_pool.stride(1),
        page_table.stride(0),
        out.stride(0),
        out.stride(1),
        *block_counts.stride(),
        delta.stride(0),
        delta.stride(1) if delta.ndim == 2 else 0,
        workspace.dropped[0].numel(),
        batch,
        kv_heads,
        -(-sink_tokens // block_size),
        window_tokens,
        min_context,
        BITS=bits,
        HALF=half,
        G=group_size,
        GROUP=score_tile.padded_group(group_size),
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        SUB_ROWS=max(16, triton.next_power_of_2(head_dim // subs)),
        PAGE=page_size,
        BLOCK=block_size,
        CHUNK=plan.CHUNK,
        TILE=config.tile,
        FORCED_TILE=forced_tile(page_size, head_dim, q.dtype),
        CELLS=0 if value_means is None else value_means.shape[2],
        TILE_CELLS=TAIL_CELLS,
        Q_CHUNK=triton.next_power_of_2(group_size * head_dim),
        REQUESTS=score_tile.REQUESTS,
        PAGE_WEIGHT=fused_shares.PAGE_WEIGHT,
        KEPT_WEIGHT=fused_shares.KEPT_WEIGHT,
        ALIGNED=last_kept is not None and fused_shares.aligned(batch * kv_heads, programs),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        maxnreg=config.registers,
    )
    combine_parts(workspace, seq_lens, page_size, out, block_counts, kept_total, last_kept, lse)
