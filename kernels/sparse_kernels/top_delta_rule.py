"""Top-delta rule: every block with a token whose score comes within delta nats of its head's pseudo-maximum (FFD)."""

import torch
import triton
import triton.language as tl

from ._checks import check_dtype, check_inner_contiguous, check_rows, check_shape, check_sizes
from ._dispatch import use_triton
from ._selection import forced_blocks
from .pseudo_maximum import forced_range
from .selection_tap import TapPoint, copy_row, tap_arguments

MAX_CHUNK = 8192
"""Blocks that a program looks at in one step, at most."""


def top_delta_rule_reference(
    block_max: torch.Tensor,
    pseudo_max: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    delta: torch.Tensor,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    kept_total: torch.Tensor | None = None,
    kept_mask: torch.Tensor | None = None,
    tap: TapPoint | None = None,
) -> None:
    """Torch reference of `top_delta_rule`."""
    batch, kv_heads, _, _ = block_max.shape
    deltas = (delta[:batch, None] if delta.ndim == 1 else delta[:batch]).expand(batch, kv_heads)
    for b, length in enumerate(seq_lens[:batch].tolist()):
        n = -(-length // block_size)
        indices = torch.arange(n, dtype=torch.int32, device=block_max.device)
        kept = torch.ones(kv_heads, n, dtype=torch.bool, device=block_max.device)
        if length >= max(min_context, 1):
            sink, tail = forced_blocks(length, page_size, block_size, sink_tokens, window_tokens)
            least = pseudo_max[b] - deltas[b, :, None]
            # What is no number keeps everything: neither comparison holds.
            least = torch.where(least.isfinite(), least, float("-inf"))
            kept = ~(block_max[b, :, :, :n] < least[..., None]).all(1)
            kept |= (indices < sink) | (indices >= tail)
        block_counts[b] = kept.sum(1)
        head, block = kept.nonzero(as_tuple=True)
        block_lists[b][head, (kept.cumsum(1) - 1)[head, block]] = block.to(torch.int32)
        if kept_mask is not None:
            kept_mask[b, :, :n] = kept
    if kept_total is not None:
        kept_total += block_counts.sum(0)
    if tap is not None:
        tap.record_reference(seq_lens, block_lists, block_counts)


@triton.jit
def least_score(highest, delta):
    """The score from which on a block is kept: -inf, which keeps all, where that is no finite number."""
    least = highest - delta
    # An infinite or missing number minus itself is no number.
    return tl.where(least - least == 0, least, float("-inf"))


@triton.jit(do_not_specialize=["sink_blocks", "window_tokens", "min_context", "layer", "first_row"])
def _top_delta_kernel(
    block_max,
    pseudo_max,
    seq_lens,
    deltas,
    block_lists,
    block_counts,
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
    max_batch_stride,
    max_head_stride,
    max_group_stride,
    pseudo_batch_stride,
    pseudo_head_stride,
    lists_batch_stride,
    lists_head_stride,
    mask_batch_stride,
    mask_head_stride,
    counts_batch_stride,
    counts_head_stride,
    deltas_batch_stride,
    deltas_head_stride,
    kv_heads,
    sink_blocks,
    window_tokens,
    min_context,
    G: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    Q_CHUNK: tl.constexpr,
):
    b = tl.program_id(0) // kv_heads
    h = tl.program_id(0) % kv_heads
    row = b.to(tl.int64)
    length = tl.load(seq_lens + b)
    blocks_in_row = tl.cdiv(length, BLOCK)
    delta = tl.load(deltas + b * deltas_batch_stride + h * deltas_head_stride)
    maxima = block_max + row * max_batch_stride + h * max_head_stride
    lists = block_lists + row * lists_batch_stride + h * lists_head_stride
    sink, tail = forced_range(length, sink_blocks, window_tokens, PAGE, BLOCK)
    # Rows that keep all need no maxima, which nobody may have written.
    tests = (length >= min_context) & (delta < float("inf"))
    count = tl.zeros((), tl.int32)
    for start in range(0, blocks_in_row, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        inside = blocks < blocks_in_row
        kept = (blocks < sink) | (blocks >= tail) | (not tests)
        for g in tl.static_range(G):
            highest = tl.load(
                pseudo_max + row * pseudo_batch_stride + h * pseudo_head_stride + g, mask=tests, other=0.0
            )
            scores = tl.load(maxima + g * max_group_stride + blocks, mask=inside & tests, other=float("-inf"))
            kept = kept | (scores >= least_score(highest, delta)) | (scores != scores)
        kept = kept & inside
        ranks = tl.cumsum(kept.to(tl.int32), 0)
        tl.store(lists + count + ranks - 1, blocks, mask=kept)
        count += tl.sum(kept.to(tl.int32))
        if kept_mask is not None:
            mask = kept_mask + row * mask_batch_stride + h * mask_head_stride
            tl.store(mask + blocks, kept.to(tl.uint8), mask=inside)
    tl.store(block_counts + b * counts_batch_stride + h * counts_head_stride, count)
    if kept_total is not None:
        tl.atomic_add(kept_total + h, count.to(tl.int64), sem="relaxed")
    if tap_target is not None:  # noqa: SIM102 - a condition of the compiler's
        if (tl.load(tap_target) == layer) & (tl.load(tap_target + 1) == first_row + b):
            tl.store(tap_seq_len, length)
            tl.store(tap_counts + h, count)
            queries = q + row * q_batch_stride + h * G * q_head_stride
            copy_row(
                lists, count, queries, q_head_stride, tap_lists + h * capacity, tap_q + h * G * D, G, D, Q_CHUNK, CHUNK
            )


def top_delta_rule(
    block_max: torch.Tensor,
    pseudo_max: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    delta: torch.Tensor,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    kept_total: torch.Tensor | None = None,
    kept_mask: torch.Tensor | None = None,
    tap: TapPoint | None = None,
    impl: str = "auto",
) -> None:
    """Writes the block list of every row: forced blocks, and those with a score near the largest, for any query head.

    Block j is kept if `block_max[g, j] >= pseudo_max[g] - delta` for some head g of the group, or if `block_max[g, j]`
    is no number. One pass, without a search: what a block's neighbours hold does not matter. Forced blocks are those of
    `coverage_rule`.

    All blocks are kept where `seq_len < min_context`, where delta is +inf or no number, and where `pseudo_max` is not
    finite.

    Args:
        block_max: `[B, Hkv, G, N]` fp32, nats: largest score of each block's tokens. The first
            `ceil(seq_len / block_size)` entries of a row are read.
        pseudo_max: `[B, Hkv, G]` fp32, nats, as `pseudo_maximum` writes it.
        seq_lens: `[>=B]` int32, in tokens; 0 for padded rows, which get empty lists.
        delta: `[>=B]` or `[>=B, Hkv]` fp32, nats.
        page_size, block_size, sink_tokens, window_tokens, min_context, block_lists, block_counts, kept_total,
            kept_mask, tap: as in `coverage_rule`.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_sizes(page_size, block_size)
    check_shape("block_max", block_max, None, None, None, None)
    check_dtype("block_max", block_max, torch.float32)
    check_inner_contiguous("block_max", block_max)
    batch, kv_heads, group_size, capacity = block_max.shape
    check_shape("pseudo_max", pseudo_max, batch, kv_heads, group_size)
    check_dtype("pseudo_max", pseudo_max, torch.float32)
    check_inner_contiguous("pseudo_max", pseudo_max)
    check_rows("seq_lens", seq_lens, batch)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_delta(delta, batch, kv_heads)
    check_forcing(sink_tokens, window_tokens)
    check_shape("block_lists", block_lists, batch, kv_heads, capacity)
    check_dtype("block_lists", block_lists, torch.int32)
    check_inner_contiguous("block_lists", block_lists)
    check_shape("block_counts", block_counts, batch, kv_heads)
    check_dtype("block_counts", block_counts, torch.int32)
    if kept_total is not None:
        check_shape("kept_total", kept_total, kv_heads)
        check_dtype("kept_total", kept_total, torch.int64)
    if kept_mask is not None:
        check_shape("kept_mask", kept_mask, batch, kv_heads, capacity)
        check_dtype("kept_mask", kept_mask, torch.uint8)
        check_inner_contiguous("kept_mask", kept_mask)
    if tap is not None:
        tap.check(block_max.shape)
    if not use_triton(impl, block_max):
        top_delta_rule_reference(
            block_max,
            pseudo_max,
            seq_lens,
            delta=delta,
            page_size=page_size,
            block_size=block_size,
            sink_tokens=sink_tokens,
            window_tokens=window_tokens,
            min_context=min_context,
            block_lists=block_lists,
            block_counts=block_counts,
            kept_total=kept_total,
            kept_mask=kept_mask,
            tap=tap,
        )
        return
    if batch == 0:
        return
    head_dim = 1 if tap is None else tap.q.shape[2]
    chunk = min(MAX_CHUNK, max(128, triton.next_power_of_2(capacity)))
    _top_delta_kernel[(batch * kv_heads,)](
        block_max,
        pseudo_max,
        seq_lens,
        delta,
        block_lists,
        block_counts,
        kept_total,
        kept_mask,
        *tap_arguments(tap),
        capacity,
        *block_max.stride()[:3],
        *pseudo_max.stride()[:2],
        *block_lists.stride()[:2],
        *((0, 0) if kept_mask is None else kept_mask.stride()[:2]),
        *block_counts.stride(),
        delta.stride(0),
        delta.stride(1) if delta.ndim == 2 else 0,
        kv_heads,
        -(-sink_tokens // block_size),
        window_tokens,
        min_context,
        G=group_size,
        PAGE=page_size,
        BLOCK=block_size,
        CHUNK=chunk,
        D=head_dim,
        Q_CHUNK=triton.next_power_of_2(group_size * head_dim),
        num_warps=max(1, min(16, chunk // 256)),
    )


def check_delta(delta: torch.Tensor, batch: int, kv_heads: int) -> None:
    """Raises ValueError unless delta is `[>=B]` or `[>=B, Hkv]` fp32."""
    check_rows("delta", delta, batch, 2 if delta.ndim == 2 else 1)
    if delta.ndim == 2:
        check_shape("delta", delta, None, kv_heads)
    check_dtype("delta", delta, torch.float32)


def check_forcing(sink_tokens: int, window_tokens: int) -> None:
    """Raises ValueError unless both are numbers of tokens."""
    for label, value in (("sink_tokens", sink_tokens), ("window_tokens", window_tokens)):
        if value < 0:
            raise ValueError(f"{label} is {value}; needed: 0 or more")
