"""What the two selection rules share outside their kernels: argument checks and the torch reference of a set choice."""

from collections.abc import Callable

import torch

from ._checks import check_choice, check_dtype, check_inner_contiguous, check_rows, check_shape, check_sizes
from .selection_tap import TapPoint

GROUPS = ("average", "every")

MASS_BITS = 30
"""Masses are summed as integers in units of `2**-MASS_BITS`: exact, so that neither order nor device changes a set, and
small enough for 32 bits. They are rounded to the nearest unit: the sum over 100,000 blocks is off by about 1e-7."""

COUNT_SHIFT = 44
"""Kernels pack a count of blocks from this bit on and their mass, which is at most 1 and rounding, below it."""

MAX_BLOCKS = 2 ** (63 - COUNT_SHIFT) - 1


def check_rule(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    name: str,
    target: torch.Tensor,
    group: str,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    scratch: torch.Tensor,
    kept_total: torch.Tensor | None,
    kept_mask: torch.Tensor | None,
    tap: TapPoint | None,
) -> None:
    """Raises ValueError unless a rule's arguments are as documented; `target` is gamma or top_k, which `name` says."""
    check_sizes(page_size, block_size)
    check_choice("group", group, GROUPS)
    check_shape("log_mass", log_mass, None, None, None, None)
    check_dtype("log_mass", log_mass, torch.float32)
    check_inner_contiguous("log_mass", log_mass)
    batch, kv_heads, _, capacity = log_mass.shape
    if capacity > MAX_BLOCKS:
        raise ValueError(f"log_mass holds {capacity} blocks a row; allowed: at most {MAX_BLOCKS}")
    check_rows("seq_lens", seq_lens, batch)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_rows(name, target, batch, 2 if target.ndim == 2 else 1)
    if target.ndim == 2:
        check_shape(name, target, None, kv_heads)
    check_dtype(name, target, torch.float32)
    for label, value in (("sink_tokens", sink_tokens), ("window_tokens", window_tokens)):
        if value < 0:
            raise ValueError(f"{label} is {value}; needed: 0 or more")
    check_shape("block_lists", block_lists, batch, kv_heads, capacity)
    check_dtype("block_lists", block_lists, torch.int32)
    check_inner_contiguous("block_lists", block_lists)
    check_shape("block_counts", block_counts, batch, kv_heads)
    check_dtype("block_counts", block_counts, torch.int32)
    check_shape("scratch", scratch, batch, kv_heads, capacity)
    check_dtype("scratch", scratch, torch.float32)
    check_inner_contiguous("scratch", scratch)
    if kept_total is not None:
        check_shape("kept_total", kept_total, kv_heads)
        check_dtype("kept_total", kept_total, torch.int64)
    if kept_mask is not None:
        check_shape("kept_mask", kept_mask, batch, kv_heads, capacity)
        check_dtype("kept_mask", kept_mask, torch.uint8)
        check_inner_contiguous("kept_mask", kept_mask)
    if tap is not None:
        tap.check(log_mass.shape)


def forced_blocks(
    length: int, page_size: int, block_size: int, sink_tokens: int, window_tokens: int
) -> tuple[int, int]:
    """Forced blocks of a row of `length` tokens: those below the first and those from the second number returned.

    Forced are blocks that hold a token below `sink_tokens`, at or beyond `length - window_tokens`, or of the open page.
    """
    tail = length // page_size * (page_size // block_size)
    if window_tokens > 0:
        tail = min(tail, max(length - window_tokens, 0) // block_size)
    return -(-sink_tokens // block_size), tail


_UNREACHABLE = 2**62
"""A goal that no row reaches: it keeps all blocks."""


def _smallest_sets(p: torch.Tensor, weights: torch.Tensor, goal: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """Forced blocks plus the largest `p` until the weights reach the goal; ties take the lower index.

    Args:
        p: `[..., n]` fp32 shares of the blocks. A row with a NaN keeps all its blocks.
        weights: `[..., n]` int64.
        goal: int64, broadcast against `[..., 1]`: what the weights of a set must reach; a row that cannot reach it
            keeps all its blocks.
        forced: `[n]` bool.

    Returns:
        `[..., n]` bool.
    """
    free = torch.where(forced, 0, weights)
    missing = goal - (weights - free).sum(-1, keepdim=True)
    order = torch.where(forced, -1.0, p).sort(dim=-1, descending=True, stable=True).indices
    sorted_weights = free.gather(-1, order)
    before = sorted_weights.cumsum(-1) - sorted_weights
    kept = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, order, before < missing)
    return kept | forced | p.isnan().any(-1, keepdim=True)


def select_reference(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    target: torch.Tensor,
    goal_of: Callable[[float, int], int | None],
    by_count: bool,
    group: str,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    kept_total: torch.Tensor | None,
    kept_mask: torch.Tensor | None,
    tap: TapPoint | None,
) -> None:
    """Torch reference of both rules.

    Args:
        target: `[>=B]`, or `[>=B, Hkv]`.
        goal_of: from a row's target and number of blocks, what the weights must reach; None keeps all blocks.
        by_count: the weight of a block is 1 instead of its share of the mass.
    """
    batch, kv_heads, group_size, _ = log_mass.shape
    device = log_mass.device
    targets = (target[:batch, None] if target.ndim == 1 else target[:batch]).expand(batch, kv_heads).tolist()
    for b, length in enumerate(seq_lens[:batch].tolist()):
        n = -(-length // block_size)
        indices = torch.arange(n, dtype=torch.int32, device=device)
        goals = [goal_of(wanted, n) for wanted in targets[b]]
        if length < max(min_context, 1) or all(goal is None for goal in goals):
            block_lists[b, :, :n] = indices
            block_counts[b] = n
            if kept_mask is not None:
                kept_mask[b, :, :n] = 1
            continue
        sink, tail = forced_blocks(length, page_size, block_size, sink_tokens, window_tokens)
        p = log_mass[b, :, :, :n].softmax(-1)
        if group == "average":
            p = p.sum(1, keepdim=True) / group_size
        weights = torch.ones_like(p, dtype=torch.int64) if by_count else (p * 2.0**MASS_BITS + 0.5).long()
        goal = torch.tensor([_UNREACHABLE if goal is None else goal for goal in goals], device=device)[:, None, None]
        kept = _smallest_sets(p, weights, goal, (indices < sink) | (indices >= tail)).any(1)
        counts = kept.sum(1)
        block_counts[b] = counts
        head, block = kept.nonzero(as_tuple=True)
        block_lists[b][head, (kept.cumsum(1) - 1)[head, block]] = block.to(torch.int32)
        if kept_mask is not None:
            kept_mask[b, :, :n] = kept
    if kept_total is not None:
        kept_total += block_counts.sum(0)
    if tap is not None:
        tap.record_reference(seq_lens, block_lists, block_counts)
