"""Coverage rule: the smallest set of blocks whose estimated attention mass reaches gamma."""

import torch

from ._dispatch import use_triton
from ._select import launch_select
from ._selection import MASS_BITS, check_rule, select_reference
from .selection_tap import TapPoint


def _goal(gamma: float, blocks: int) -> int | None:
    return max(int(gamma * 2.0**MASS_BITS), 1) if gamma < 1 else None


def coverage_rule_reference(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    gamma: torch.Tensor,
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
    """Torch reference of `coverage_rule`."""
    select_reference(
        log_mass,
        seq_lens,
        gamma,
        _goal,
        False,
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


def _coverage_rule_triton(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    gamma: torch.Tensor,
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
        gamma,
        False,
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


def coverage_rule(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    gamma: torch.Tensor,
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
    """Writes the block list of every row: forced blocks, and the fewest others that bring its coverage to gamma.

    A head's share of block j is `exp(log_mass[g, j] - logsumexp_j log_mass[g, :])`. Group `average` adds blocks by
    falling mean share of the group (ties: lower index) until the sum, forced blocks included, is at least gamma. Group
    `every` does so for each query head alone and keeps the union. Shares are summed as integers in units of 2**-30.

    All blocks are kept where `seq_len < min_context`, where `gamma >= 1` (or is NaN), where rounding keeps the sum of
    all blocks below gamma, and where `log_mass` holds NaN or +inf. A row that is not empty keeps at least one block.

    Args:
        log_mass: `[B, Hkv, G, N]` fp32; entries of a row from `ceil(seq_len / block_size)` on may hold anything.
        seq_lens: `[>=B]` int32, in tokens; 0 for padded rows, which get empty lists.
        gamma: `[>=B]` or `[>=B, Hkv]` fp32, the coverage asked for.
        group: `average` or `every`.
        page_size: tokens in a page.
        block_size: tokens in a block; divides `page_size`.
        sink_tokens: blocks with a token below this one are forced.
        window_tokens: blocks with one of the last `window_tokens` tokens are forced. Blocks of the open page always
            are.
        min_context: rows with fewer tokens keep all blocks; their `log_mass` may hold anything.
        block_lists: `[B, Hkv, N]` int32, output: ascending block indices.
        block_counts: `[B, Hkv]` int32, output: lengths of the lists.
        scratch: `[B, Hkv, N]` fp32; its content on return is undefined.
        kept_total: `[Hkv]` int64, increased by the counts; optional.
        kept_mask: `[B, Hkv, N]` uint8, output: 1 for the blocks of a row that are listed, 0 for its others; beyond the
            row, up to 15 entries may become 0. Optional.
        tap: gets a copy of one request's lists, counts and queries if its target names this call; optional.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype, size or group is not as above.
    """
    check_rule(
        log_mass,
        seq_lens,
        "gamma",
        gamma,
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
    run = _coverage_rule_triton if use_triton(impl, log_mass) else coverage_rule_reference
    run(
        log_mass,
        seq_lens,
        gamma=gamma,
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
