"""What heads are trained on: the attention mass of blocks under the true queries, and under the forecast ones.

Shapes: n queries, N blocks of a sequence of T tokens. All masses are exact sums over the tokens of a block.
"""

from __future__ import annotations

import torch

LOWEST = -1e30
"""Instead of minus infinity where a gradient passes: the log of a sum of nothing has none."""


def block_log_masses(
    vectors: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, *, scale: float, block: int
) -> torch.Tensor:
    """Log of each block's sum of `exp(vector . key * scale)` over the tokens up to a query's own: `[n, Hkv, R, N]`.

    Args:
        vectors: `[n, Hkv, R, D]` fp32, rotated.
        keys: `[T, Hkv, D]`.
        positions: `[n]` int64, of the queries.
    """
    scores = torch.einsum("nhrd,thd->nhrt", vectors, keys.to(vectors.dtype)) * scale
    tokens = torch.arange(len(keys), device=keys.device)
    scores = scores.masked_fill((tokens > positions[:, None])[:, None, None], LOWEST)
    scores = torch.nn.functional.pad(scores, (0, -len(keys) % block), value=LOWEST)
    return scores.unflatten(-1, (-1, block)).logsumexp(-1)


def choosable(positions: torch.Tensor, tokens: int, *, block: int, sink: int, window: int) -> torch.Tensor:
    """Blocks that a step may leave out: `[n, N]` bool. Sinks and latest tokens are always read."""
    first = torch.arange(0, tokens, block, device=positions.device)
    return (first >= sink) & (first + block <= (positions[:, None] + 1 - window).clamp_min(0))


def group_log_shares(masses: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Log of each block's share, mean over the R vectors of a KV head: `[n, Hkv, N]`; lowest where not `valid`."""
    shares = masses.masked_fill(~valid[:, None, None], LOWEST).log_softmax(-1)
    return shares.logsumexp(2) - torch.tensor(float(masses.shape[2])).log()


def divergence(true: torch.Tensor, guess: torch.Tensor, valid: torch.Tensor, top: float) -> torch.Tensor:
    """KL of the guess from the truth, mean over queries and heads.

    The blocks of the largest true shares count one by one, all others as one bucket.

    Args:
        true, guess: `[n, Hkv, N]`, log shares.
        valid: `[n, N]` bool, blocks that count at all; some in each row.
        top: share of them that counts one by one.
    """
    count = (valid.sum(-1) * top).ceil().long().clamp_min(1)
    ordered = true.sort(-1, descending=True).indices
    rank = torch.empty_like(ordered)
    rank.scatter_(-1, ordered, torch.arange(true.shape[-1], device=true.device).expand_as(ordered))
    alone = (rank < count[:, None, None]) & valid[:, None]
    rest = ~alone & valid[:, None]
    singles = torch.where(alone, true.exp() * (true - guess), 0.0).sum(-1)
    true_rest, guess_rest = (each.masked_fill(~rest, LOWEST).logsumexp(-1) for each in (true, guess))
    bucket = torch.where(rest.any(-1), true_rest.exp() * (true_rest - guess_rest), 0.0)
    return (singles + bucket).mean()


def recall(true: torch.Tensor, guess: torch.Tensor, valid: torch.Tensor, gamma: float) -> torch.Tensor:
    """Of the fewest blocks that hold `gamma` of the true mass, the share among as many that the guess puts first.

    Arguments as for `divergence`; a number, over all queries and heads.
    """
    order = true.sort(-1, descending=True)
    count = (order.values.exp().cumsum(-1) < gamma).sum(-1) + 1
    count = count.minimum(valid.sum(-1)[:, None])
    index = torch.arange(true.shape[-1], device=true.device)
    first = index < count[..., None]
    wanted = torch.zeros_like(first).scatter_(-1, order.indices, first)
    named = torch.zeros_like(first).scatter_(-1, guess.argsort(-1, descending=True), first)
    return (wanted & named).sum() / count.sum()
