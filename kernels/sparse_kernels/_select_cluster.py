"""Both selection rules, of group `average`, with each row split over a cluster of thread blocks.

One program a row leaves most of a GPU idle where rows are few. Here a row's K programs hold a segment each, in
registers, and exchange sums. A pass over a segment is short next to an exchange, so it tests many thresholds. The sums
are those of `_threshold_search`, integers: what a row keeps is the smallest set that reaches the goal, whatever
thresholds lead to it.
"""

import torch
import triton
import triton.language as tl

from . import _threshold_search as threshold_search
from . import selection_tap
from ._cluster_exchange import announce_start, await_start, exchange_buffer
from ._cluster_launch import cluster_sizes, launch_clusters
from ._cluster_search import load_four, segment_shares, smallest_set_of_segments
from ._dispatch import multiprocessors
from ._select_row import select_row
from ._select_single import rows_are_aligned, vector_bound
from .selection_tap import TapPoint

MAX_SEGMENT = 1024
"""Blocks of a program at most. With 2,048 rows in clusters are slower than others: on an H200 8 KV heads of 2,063 to
8,125 blocks took 27 to 30 microseconds then, and 16 to 19 with a program a row."""

MIN_SEGMENT = 16
"""So that segments begin where vectors do."""

SPARE_SHARE = 64
"""Of a capacity that share need not be in segments, if they are half as long for it: rows that are longer than these
are done by one program. A server's rows have room for a page more than its context, which no request fills."""

SHORT_ROW = 2048
"""Rows of at most this many blocks are no faster in a cluster: on an H200 8 KV heads of 2,048 blocks took 10.4
microseconds in clusters, and 8.3 without."""

WARPS = 8
"""Of a program."""

THRESHOLDS = 16
"""Of a pass. On an H200 32 took longer: passes get fewer by less than each gets longer."""


def chosen_size(log_mass: torch.Tensor) -> int:
    """Thread blocks that each row of `log_mass [B, Hkv, G, N]` is split over; 1 to run a program a row instead.

    As many as let all clusters run at once, one block a multiprocessor: clusters that wait for others take longer than
    rows that are not split (on an H200, 32 rows in clusters of 8 took 25 microseconds, and 20 without).
    """
    batch, kv_heads, _, capacity = log_mass.shape
    if capacity <= SHORT_ROW:
        return 1
    rows = batch * kv_heads
    for size in cluster_sizes(log_mass.device):
        if rows * size <= multiprocessors(log_mass.device.index) and segment_size(capacity, size) <= MAX_SEGMENT:
            return size
    return 1


def segment_size(capacity: int, size: int) -> int:
    """Blocks of each of a row's `size` programs, for rows of up to `capacity`."""
    return max(MIN_SEGMENT, triton.next_power_of_2(triton.cdiv(capacity - capacity // SPARE_SHARE, size)))


@triton.jit(do_not_specialize=["sink_blocks", "window_tokens", "min_context", "layer", "first_row"])
def _select_cluster_kernel(
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
    BY_COUNT: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr,
    SHORT: tl.constexpr,
    SHORT_CHUNK: tl.constexpr,
    LONGER: tl.constexpr,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    Q_CHUNK: tl.constexpr,
):
    if K > 1:
        announce_start()
    segment = tl.program_id(0) % K
    b = tl.program_id(0) // K // kv_heads
    h = tl.program_id(0) // K % kv_heads
    row = b.to(tl.int64)
    blocks = segment * N + tl.arange(0, N)
    room = blocks < capacity
    mass = log_mass + row * mass_batch_stride + h * mass_head_stride
    # These need not wait for the row's length: what they find beyond it is not used.
    row0, row1, row2, row3 = load_four(mass, mass_group_stride, 0, blocks, room, G)
    length = tl.load(seq_lens + b)
    target = tl.load(targets + b * targets_batch_stride + h * targets_head_stride)
    lists = block_lists + row * lists_batch_stride + h * lists_head_stride
    row_mask = None
    if kept_mask is not None:
        row_mask = kept_mask + row * mask_batch_stride + h * mask_head_stride
    if tap_target is not None:
        tapped = (tl.load(tap_target) == layer) & (tl.load(tap_target + 1) == first_row + b)
    blocks_in_row = tl.cdiv(length, BLOCK)
    count = blocks_in_row
    alone = blocks_in_row <= SHORT
    if LONGER:
        alone = alone | (blocks_in_row > K * N)
    # The cluster's programs agree on this, and on all conditions around exchanges below.
    if alone:
        if segment == 0:
            count = select_row(
                mass,
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
                False,
                BY_COUNT,
                PAGE,
                BLOCK,
                SHORT_CHUNK,
                (SHORT_CHUNK,),
                LONGER,
                ALIGNED,
            )
            if tap_target is not None:  # noqa: SIM102 - a condition of the compiler's
                if tapped:
                    selection_tap.copy_list(lists, count, tap_lists + h * capacity, SHORT_CHUNK)
    else:
        inside = blocks < blocks_in_row
        sink, tail = threshold_search.free_range(length, sink_blocks, window_tokens, PAGE, BLOCK)
        limit = blocks_in_row.to(tl.float32) if BY_COUNT else 1.0
        buffer = exchange_buffer(K, T)
        if K > 1:
            await_start()
        # All blocks, unless there is a choice.
        kept = inside
        ranks = blocks + 1
        if (length >= min_context) & (target < limit) & (blocks_in_row > 0):
            goal = threshold_search.goal_of(target, blocks_in_row, BY_COUNT).to(tl.int32)
            guess = threshold_search.first_guess(target, blocks_in_row, BY_COUNT)
            shares, valid = segment_shares(
                row0, row1, row2, row3, mass, mass_group_stride, blocks, room, inside, buffer, G, K, T
            )
            done = (G + 3) // 4
            kept, before, count = smallest_set_of_segments(
                shares, valid, blocks, blocks_in_row, sink, tail, segment, goal, guess, buffer, done, BY_COUNT, K, T
            )
            ranks = tl.cumsum(kept.to(tl.int32), 0) + before
        tl.store(lists + ranks - 1, blocks, mask=kept)
        if kept_mask is not None:
            tl.store(row_mask + blocks, kept.to(tl.uint8), mask=blocks < vector_bound(blocks_in_row, ALIGNED))
        if tap_target is not None:
            # Each program copies what it wrote: the others' parts of the list may not be there yet.
            tl.store(tap_lists + h * capacity + ranks - 1, blocks, mask=kept & tapped)
    if segment == 0:
        tl.store(block_counts + b * counts_batch_stride + h * counts_head_stride, count)
        if kept_total is not None:
            tl.atomic_add(kept_total + h, count.to(tl.int64), sem="relaxed")
        if tap_target is not None:  # noqa: SIM102 - a condition of the compiler's
            if tapped:
                tl.store(tap_seq_len, length)
                tl.store(tap_counts + h, count)
                queries = q + row * q_batch_stride + h * G * q_head_stride
                selection_tap.copy_queries(queries, q_head_stride, tap_q + h * G * D, G, D, Q_CHUNK)


def launch_select_cluster(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    targets: torch.Tensor,
    by_count: bool,
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
    size: int,
    *,
    short: int = SHORT_ROW,
    thresholds: int = THRESHOLDS,
    warps: int = WARPS,
) -> None:
    """Runs a rule of group `average` with each row split over a cluster of thread blocks.

    Args:
        log_mass: `[B, Hkv, G, N]` fp32, B not 0. All N may be read.
        targets: top_k if `by_count`, else gamma; fp32 `[>=B]` or `[>=B, Hkv]`.
        size: thread blocks of a cluster, 8 or 16, which the device takes (`chosen_size`); 1 runs the same search
            without clusters, also in the interpreter.
        short: rows of at most this many blocks, 0 or more, are done by the first program of their cluster alone, as are
            rows longer than all segments (`SPARE_SHARE`).
        thresholds: tested in a pass, a power of two, 8 or more.
        warps: of a thread block.
        The others are as in `coverage_rule`.
    """
    batch, kv_heads, group_size, capacity = log_mass.shape
    segment = segment_size(capacity, size)
    head_dim = 1 if tap is None else tap.q.shape[2]
    arguments = (
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
    )
    constants = {
        "G": group_size,
        "BY_COUNT": by_count,
        "PAGE": page_size,
        "BLOCK": block_size,
        "K": size,
        "N": segment,
        "T": thresholds,
        "SHORT": short,
        "SHORT_CHUNK": max(MIN_SEGMENT, triton.next_power_of_2(short)),
        "LONGER": capacity > size * segment,
        "ALIGNED": rows_are_aligned(log_mass, kept_mask),
        "D": head_dim,
        "Q_CHUNK": triton.next_power_of_2(group_size * head_dim),
    }
    launch_clusters(_select_cluster_kernel, batch * kv_heads, size, arguments, constants, num_warps=warps)
