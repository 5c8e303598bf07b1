"""The kernel behind both selection rules: one program for each row, where not a cluster of them (`_select_cluster`)."""

import torch
import triton
import triton.language as tl

from . import selection_tap
from ._select_cluster import chosen_size, launch_select_cluster
from ._select_row import select_row
from ._select_single import rows_are_aligned
from .selection_tap import TapPoint

SINGLE_SIZES = (2048, 8192, 16384)
"""Rows up to these lengths, in blocks, are kept in registers by a program; longer ones go through scratch in chunks."""

CHUNK = 4096


@triton.jit(do_not_specialize=["sink_blocks", "window_tokens", "min_context", "layer", "first_row"])
def _select_kernel(
    log_mass,
    seq_lens,
    targets,
    block_lists,
    block_counts,
    scratch,
    kept_total,
    kept_mask,
    q,
    tap_target,
    tap_q,
    tap_lists,
    tap_counts,
    tap_seq_len,
    layer,
    first_row,
    q_batch_stride,
    q_head_stride,
    capacity,
    mass_batch_stride,
    mass_head_stride,
    mass_group_stride,
    lists_batch_stride,
    lists_head_stride,
    scratch_batch_stride,
    scratch_head_stride,
    mask_batch_stride,
    mask_head_stride,
    counts_batch_stride,
    counts_head_stride,
    targets_batch_stride,
    targets_head_stride,
    kv_heads,
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
    D: tl.constexpr,
    Q_CHUNK: tl.constexpr,
):
    b = tl.program_id(0) // kv_heads
    h = tl.program_id(0) % kv_heads
    if tap_target is not None:
        tapped = (tl.load(tap_target) == layer) & (tl.load(tap_target + 1) == first_row + b)
    row = b.to(tl.int64)
    length = tl.load(seq_lens + b)
    target = tl.load(targets + b * targets_batch_stride + h * targets_head_stride)
    lists = block_lists + row * lists_batch_stride + h * lists_head_stride
    row_mask = None
    if kept_mask is not None:
        row_mask = kept_mask + row * mask_batch_stride + h * mask_head_stride
    count = select_row(
        log_mass + row * mass_batch_stride + h * mass_head_stride,
        mass_group_stride,
        length,
        target,
        lists,
        scratch + row * scratch_batch_stride + h * scratch_head_stride,
        row_mask,
        sink_blocks,
        window_tokens,
        min_context,
        G,
        EVERY,
        BY_COUNT,
        PAGE,
        BLOCK,
        CHUNK,
        SIZES,
        LONGER,
        ALIGNED,
    )
    tl.store(block_counts + b * counts_batch_stride + h * counts_head_stride, count)
    if kept_total is not None:
        tl.atomic_add(kept_total + h, count.to(tl.int64), sem="relaxed")
    if tap_target is not None:  # noqa: SIM102 - a condition of the compiler's
        if tapped:
            tl.store(tap_seq_len, length)
            tl.store(tap_counts + h, count)
            queries = q + row * q_batch_stride + h * G * q_head_stride
            selection_tap.copy_row(
                lists, count, queries, q_head_stride, tap_lists + h * capacity, tap_q + h * G * D, G, D, Q_CHUNK, CHUNK
            )


def launch_select(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    targets: torch.Tensor,
    by_count: bool,
    group: str,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    scratch: torch.Tensor,
    kept_total: torch.Tensor | None,
    kept_mask: torch.Tensor | None,
    tap: TapPoint | None,
) -> None:
    """Runs a rule: `targets` is top_k if `by_count`, else gamma; `[>=B]`, or `[>=B, Hkv]`.

    Few rows, of group `average`, are each split over a cluster of thread blocks (`chosen_size`) where the device takes
    them. Of given shares both ways keep the same blocks. But they add up the shares' denominators, in fp32, in another
    order: where that moves a share by a rounding and the choice hangs on it, their lists differ by a block.
    """
    batch, kv_heads, group_size, capacity = log_mass.shape
    if batch == 0:
        return
    blocks_in_cluster = chosen_size(log_mass) if group == "average" else 1
    if blocks_in_cluster > 1:
        launch_select_cluster(
            log_mass,
            seq_lens,
            targets,
            by_count,
            page_size,
            block_size,
            sink_tokens,
            window_tokens,
            min_context,
            block_lists,
            block_counts,
            scratch,
            kept_total,
            kept_mask,
            tap,
            blocks_in_cluster,
        )
        return
    widest = max(128, triton.next_power_of_2(capacity))
    sizes = tuple(sorted({min(size, widest) for size in SINGLE_SIZES}))
    head_dim = 1 if tap is None else tap.q.shape[2]
    _select_kernel[(batch * kv_heads,)](
        log_mass,
        seq_lens,
        targets,
        block_lists,
        block_counts,
        scratch.view(torch.int32),
        kept_total,
        kept_mask,
        *selection_tap.tap_arguments(tap),
        capacity,
        log_mass.stride(0),
        log_mass.stride(1),
        log_mass.stride(2),
        block_lists.stride(0),
        block_lists.stride(1),
        scratch.stride(0),
        scratch.stride(1),
        *((0, 0) if kept_mask is None else kept_mask.stride()[:2]),
        block_counts.stride(0),
        block_counts.stride(1),
        targets.stride(0),
        targets.stride(1) if targets.ndim == 2 else 0,
        kv_heads,
        -(-sink_tokens // block_size),
        window_tokens,
        min_context,
        G=group_size,
        EVERY=group == "every",
        BY_COUNT=by_count,
        PAGE=page_size,
        BLOCK=block_size,
        CHUNK=CHUNK,
        SIZES=sizes,
        LONGER=capacity > max(sizes, default=0),
        ALIGNED=rows_are_aligned(log_mass, kept_mask),
        D=head_dim,
        Q_CHUNK=triton.next_power_of_2(group_size * head_dim),
        num_warps=min(16, max(1, widest // 256)),
    )
