"""Coverage: the share of a query's attention mass that the chosen blocks hold."""

from __future__ import annotations

import torch


def chosen_blocks(block_lists: torch.Tensor, block_counts: torch.Tensor) -> torch.Tensor:
    """Which blocks the lists name: `[B, Hkv, N]` bool from `[B, Hkv, N]` and `[B, Hkv]` int32."""
    capacity = block_lists.shape[-1]
    listed = torch.arange(capacity, device=block_lists.device) < block_counts[..., None]
    # Entries past the count are undefined: they go to a column of their own, which is cut off.
    chosen = torch.zeros((*block_lists.shape[:-1], capacity + 1), dtype=torch.bool, device=block_lists.device)
    return chosen.scatter_(-1, torch.where(listed, block_lists, capacity).long(), True)[..., :capacity]


def head_coverage(
    log_mass: torch.Tensor,
    seq_lens: torch.Tensor,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Share of each query head's mass in the listed blocks: `[B, Hkv, G]` fp32. Does not wait for the device.

    With the log masses of the `exact` estimator it is the true coverage, otherwise the estimated one.

    Args:
        log_mass: `[B, Hkv, G, N]` fp32; only the first `ceil(seq_len / block_size)` entries of a row are used.
        seq_lens: `[B]` int32, in tokens. Rows of no tokens count as covered.
        block_lists: `[B, Hkv, N]` int32.
        block_counts: `[B, Hkv]` int32.
    """
    blocks = torch.arange(log_mass.shape[-1], device=log_mass.device)
    inside = (blocks * block_size < seq_lens[:, None])[:, None, None]
    shares = log_mass.masked_fill(~inside, float("-inf")).softmax(-1)
    kept = chosen_blocks(block_lists, block_counts)[:, :, None] & inside
    covered = torch.where(kept, shares, 0.0).sum(-1)
    return torch.where((seq_lens > 0)[:, None, None], covered, 1.0)
