"""Top-delta selection and attention in one pass (FFD): scan a run of pages, and attend to the blocks that pass.

Two launches, whatever the data: the pass, and `_fused_combine`, which merges the rows that programs shared.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import _fused_attend as fused_attend
from . import _fused_plan as plan
from . import _fused_scan as fused_scan
from . import _fused_shares as fused_shares
from . import _score_tile as score_tile
from . import _work_split as work_split
from ._attention_plan import check_attention
from ._checks import check_choice, check_contiguous, check_dtype, check_rows, check_shape
from ._dispatch import INTERPRETED, use_triton
from ._fused_combine import combine_parts
from ._fused_plan import FusedConfig, FusedWorkspace
from .attention_tail import AttentionTail
from .block_mass_thumbnail import block_mass_thumbnail_reference
from .pseudo_maximum import forced_range, forced_tile, pseudo_maximum_reference, row_maximum
from .selection_tap import TapPoint, tap_arguments
from .sparse_attention import sparse_attention_reference
from .thumbnail import BITS, check_thumbnails
from .top_delta_rule import check_delta, check_forcing, least_score, top_delta_rule_reference

__all__ = ["FusedConfig", "FusedWorkspace", "fused_top_delta", "fused_top_delta_reference"]

TAIL_CELLS = 32
"""Cells of the tail that are worked on together."""


def fused_top_delta_reference(
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
    workspace: FusedWorkspace | None = None,
    value_means: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kept_total: torch.Tensor | None = None,
    last_kept: torch.Tensor | None = None,
    tap: TapPoint | None = None,
) -> None:
    """`fused_top_delta` in plain torch, by the operations that do the same one after another."""
    batch, heads, _ = q.shape
    kv_heads = k_pool.shape[1]
    capacity = page_table.shape[1] * (page_size // block_size)
    shape = (batch, kv_heads, heads // kv_heads, capacity)
    log_mass, block_max = torch.empty(shape, device=q.device), torch.empty(shape, device=q.device)
    pseudo_max = torch.empty(shape[:3], device=q.device)
    lists = torch.empty((*shape[:2], capacity), dtype=torch.int32, device=q.device)
    kept_mask = torch.empty_like(lists, dtype=torch.uint8)
    sizes: dict[str, Any] = {"page_size": page_size, "block_size": block_size}
    forcing = {"sink_tokens": sink_tokens, "window_tokens": window_tokens, "min_context": min_context}
    block_mass_thumbnail_reference(
        q,
        k_pool,
        codes,
        low_step,
        page_table,
        seq_lens,
        bits=bits,
        scale=scale,
        min_context=min_context,
        out=log_mass,
        block_max=block_max,
        **sizes,
    )
    pseudo_maximum_reference(q, k_pool, page_table, seq_lens, scale=scale, out=pseudo_max, **sizes, **forcing)
    top_delta_rule_reference(
        block_max,
        pseudo_max,
        seq_lens,
        delta=delta,
        block_lists=lists,
        block_counts=block_counts,
        kept_total=kept_total,
        kept_mask=kept_mask,
        tap=tap,
        **sizes,
        **forcing,
    )
    sparse_attention_reference(
        q,
        k_pool,
        v_pool,
        page_table,
        seq_lens,
        lists,
        block_counts,
        scale=scale,
        out=out,
        tail=None if value_means is None else AttentionTail(log_mass, kept_mask, value_means),
        lse=lse,
        **sizes,
    )
    if last_kept is not None:
        last_kept[:batch] = block_counts


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
    STAGES: tl.constexpr,
):
    # Where the pages are weighted, what is counted is cost, and a program may have several heads.
    if last_kept is None:
        unit, end, h = work_split.program_share(seq_lens, batch, kv_heads, 0, PAGE, 1, REQUESTS)
        program = h * (tl.num_programs(0) // kv_heads) + tl.program_id(0) // kv_heads
    else:
        program = tl.program_id(0) % kv_heads * (tl.num_programs(0) // kv_heads) + tl.program_id(0) // kv_heads
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
        else:
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


def _fused_top_delta_triton(
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
    # Sub-ranges of codes that a product takes at once; see `scan_pages`.
    subs = (8 if half else 4) if bits == 2 else 2 if bits == 4 and not half else 4
    _fused_top_delta_kernel[(workspace.num_programs // kv_heads * kv_heads,)](
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
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        maxnreg=config.registers,
    )
    combine_parts(workspace, seq_lens, page_size, out, block_counts, kept_total, last_kept, lse)


def fused_top_delta(
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
    workspace: FusedWorkspace | None,
    value_means: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kept_total: torch.Tensor | None = None,
    last_kept: torch.Tensor | None = None,
    tap: TapPoint | None = None,
    config: FusedConfig | None = None,
    impl: str = "auto",
) -> None:
    """`block_mass_thumbnail`, `top_delta_rule` and `sparse_attention` in one, without masses and lists between them.

    `out[b, h * G + g]` is attention over the kept blocks of row `(b, h)`: forced blocks, and those with a token whose
    score under the thumbnails reaches the pseudo-maximum of its head less delta, for any head of the group. Kept blocks
    are attended to with their keys. With `value_means`, the other blocks add the mean value of their cell, weighted by
    their estimated mass (`AttentionTail`).

    A program finds the pseudo-maxima of its rows itself, from the keys of the forced blocks, so that programs need
    nothing of each other before the combine. A part of a row that keeps nothing has no weight in it.

    Args:
        q: `[B, Hkv * G, D]`, pool dtype, G from 1 to 16.
        k_pool, v_pool: `[P * page_size, Hkv, D]` fp16, bf16 or fp32; last dimension contiguous.
        codes, low_step: as `thumbnail` writes them; read for closed pages. FFD's symmetric 2-bit code of scale s is the
            case low = -1.5 s, step = s.
        page_table: `[>=B, max_pages]` int32; only the first `ceil(seq_len / page_size)` entries of a row are read.
        seq_lens: `[>=B]` int32, in tokens; 0 for padded rows, which get zeros and counts of 0.
        delta: `[>=B]` or `[>=B, Hkv]` fp32, nats; +inf or NaN keeps all blocks.
        bits: 2, 3 or 4.
        scale: factor of the scores.
        page_size: tokens in a page.
        block_size: tokens in a block; divides `page_size`.
        sink_tokens, window_tokens: as in `coverage_rule`.
        min_context: rows with fewer tokens keep all blocks.
        out: `[B, Hkv * G, D]` in q's dtype, last dimension contiguous; written completely.
        block_counts: `[B, Hkv]` int32, output: blocks kept.
        workspace: see `FusedWorkspace.create`; may be None where the torch reference runs.
        value_means: `[P, Hkv, C, D]` in the pool's dtype, contiguous: mean values of the `C` cells of each closed page;
            None drops what is not kept.
        lse: `[B, Hkv * G]` fp32, contiguous, output: as in `sparse_attention`; optional.
        kept_total: `[Hkv]` int64, increased by the counts; optional.
        last_kept: `[>=B, Hkv]` int32, contiguous: blocks kept in the call before, by which pages are shared out to
            programs; its first B rows are replaced by the counts. Any values do: those of other requests cost time
            only. Neither read nor written by the kernels where `B * Hkv * max_pages` is beyond 26 million. None shares
            out equal numbers of pages.
        tap: gets one request's queries and lists, in any order, if its target names this call; its counts must be 0
            before, as `SelectionTap.arm` leaves them. Optional.
        config: launch options, those that the workspace was created for; None for the default.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    parts = None if workspace is None else workspace.parts
    sizes = (page_size, block_size)
    check_attention(q, k_pool, v_pool, page_table, seq_lens, None, None, *sizes, out, parts, lse)
    check_choice("bits", bits, BITS)
    check_thumbnails(codes, low_step, k_pool, bits, page_size)
    batch, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    check_delta(delta, batch, kv_heads)
    check_forcing(sink_tokens, window_tokens)
    check_shape("block_counts", block_counts, batch, kv_heads)
    check_dtype("block_counts", block_counts, torch.int32)
    if kept_total is not None:
        check_shape("kept_total", kept_total, kv_heads)
        check_dtype("kept_total", kept_total, torch.int64)
    if last_kept is not None:
        check_rows("last_kept", last_kept, batch, ndim=2)
        check_shape("last_kept", last_kept, None, kv_heads)
        check_dtype("last_kept", last_kept, torch.int32)
        check_contiguous("last_kept", last_kept)
    cells = 1
    if value_means is not None:
        check_shape("value_means", value_means, k_pool.shape[0] // page_size, kv_heads, None, head_dim)
        check_dtype("value_means", value_means, k_pool.dtype)
        check_contiguous("value_means", value_means)
        cells = value_means.shape[2]
        allowed = tuple(n for n in (1, 2, 4, 8, 16) if page_size % n == 0 and page_size // n % block_size == 0)
        check_choice("cells a page in value_means", cells, allowed)
    if tap is not None:
        capacity = page_table.shape[1] * (page_size // block_size)
        tap.check((batch, kv_heads, heads // kv_heads, capacity))
    arguments: dict[str, Any] = {
        "delta": delta,
        "bits": bits,
        "scale": scale,
        "page_size": page_size,
        "block_size": block_size,
        "sink_tokens": sink_tokens,
        "window_tokens": window_tokens,
        "min_context": min_context,
        "out": out,
        "block_counts": block_counts,
        "workspace": workspace,
        "value_means": value_means,
        "lse": lse,
        "kept_total": kept_total,
        "last_kept": last_kept,
        "tap": tap,
    }
    inputs = (q, k_pool, v_pool, codes, low_step, page_table, seq_lens)
    if not use_triton(impl, q):
        fused_top_delta_reference(*inputs, **arguments)
        return
    if workspace is None:
        raise ValueError("workspace is needed by the Triton kernels")
    workspace.check(kv_heads, heads // kv_heads, head_dim, page_size, block_size, cells)
    if last_kept is not None:
        check_rows("workspace.spans", workspace.spans, batch * kv_heads, ndim=2)
        if not fused_shares.fits(batch * kv_heads, page_table.shape[1]):
            arguments["last_kept"] = None
    config = config or plan.fused_config(heads // kv_heads, head_dim, page_size, block_size, q.dtype)
    if batch:
        _fused_top_delta_triton(*inputs, **arguments, config=config)
