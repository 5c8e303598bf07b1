"""Top-k rule: a fixed number, or a fixed share, of each row's blocks."""

import math

import torch

from ._dispatch import use_triton
from ._select import launch_select
from ._selection import check_rule, select_reference
from .selection_tap import TapPoint


def _goal(top_k: float, blocks: int) -> int | None:
    if not top_k < blocks:
        return None
    # The product is rounded to fp32, as in the kernel.
    share = top_k if top_k >= 1 else float(torch.tensor(top_k, dtype=torch.float32) * blocks)
    return max(math.ceil(share), 1)


def top_k_rule_reference(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    top_k: torch.Tensor,
    group: str,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    scratch: torch.Tensor,
    kept_total: torch.Tensor | None = None,
    kept_mask: torch.Tensor | None = None,
    tap: TapPoint | None = None,
) -> None:
    """Torch reference of `top_k_rule`."""
    select_reference(
        log_mass,
        seq_lens,
        top_k,
        _goal,
        True,
        group,
        page_size,
        block_size,
        sink_tokens,
        window_tokens,
        min_context,
        block_lists,
        block_counts,
        kept_total,
        kept_mask,
        tap,
    )


def _top_k_rule_triton(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    top_k: torch.Tensor,
    group: str,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    scratch: torch.Tensor,
    kept_total: torch.Tensor | None = None,
    kept_mask: torch.Tensor | None = None,
    tap: TapPoint | None = None,
) -> None:
    launch_select(
        log_mass,
        seq_lens,
        top_k,
        True,
        group,
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
    )


def top_k_rule(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    top_k: torch.Tensor,
    group: str,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    scratch: torch.Tensor,
    kept_total: torch.Tensor | None = None,
    kept_mask: torch.Tensor | None = None,
    tap: TapPoint | None = None,
    impl: str = "auto",
) -> None:
    """Writes the block list of every row: forced blocks, then the blocks of the largest estimated mass, up to k blocks.

    `k = ceil(top_k)` for `top_k >= 1`, else `ceil(top_k * blocks of the row)` (product rounded to fp32), at least 1.
    Forced blocks count towards k and are kept even where they exceed it. Group `average` ranks by the group's mean
    share of the mass (ties: lower index); group `every` takes k blocks for each query head and keeps the union. Shares
    are those of `coverage_rule`, which also states the remaining arguments.

    All blocks are kept where `seq_len < min_context`, where k reaches the number of blocks (or `top_k` is NaN), and
    where `log_mass` holds NaN or +inf.

    Args:
        top_k: `[>=B]` fp32: at least 1 a number of blocks, below 1 a share of the row's blocks.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype, size or group is not as in `coverage_rule`.
    """
    check_rule(
        log_mass,
        seq_lens,
        "top_k",
        top_k,
        group,
        page_size,
        block_size,
        sink_tokens,
        window_tokens,
        block_lists,
        block_counts,
        scratch,
        kept_total,
        kept_mask,
        tap,
    )
    run = _top_k_rule_triton if use_triton(impl, log_mass) else top_k_rule_reference
    run(
        log_mass,
        seq_lens,
        top_k=top_k,
        group=group,
        page_size=page_size,
        block_size=block_size,
        sink_tokens=sink_tokens,
        window_tokens=window_tokens,
        min_context=min_context,
        block_lists=block_lists,
        block_counts=block_counts,
        scratch=scratch,
        kept_total=kept_total,
        kept_mask=kept_mask,
        tap=tap,
    )
