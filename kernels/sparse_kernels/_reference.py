"""What the torch references of the block-mass operations share."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass
class Row:
    """One request of the batch, as the references see it."""

    index: int
    length: int
    q: torch.Tensor
    """`[Hkv, G, D]` fp32."""
    pages: torch.Tensor
    """Physical pages, `[ceil(length / page_size)]` int64."""
    k_pool: torch.Tensor
    page_size: int

    @property
    def closed(self) -> int:
        """Number of closed pages."""
        return self.length // self.page_size

    def keys(self, start: int, stop: int) -> torch.Tensor:
        """Keys of tokens `start` (on a page boundary) to `stop`: `[stop - start, Hkv, D]` fp32."""
        first, last = start // self.page_size, -(-stop // self.page_size)
        tokens = torch.arange(self.page_size, device=self.pages.device)
        slots = self.pages[first:last, None] * self.page_size + tokens
        return self.k_pool[slots.flatten()[: stop - start]].float()


def rows_to_score(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    min_context: int,
) -> Iterator[Row]:
    """The requests whose blocks get a mass: not empty, and with at least `min_context` tokens."""
    batch, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    for b, length in enumerate(seq_lens[:batch].tolist()):
        if length == 0 or length < min_context:
            continue
        yield Row(
            index=b,
            length=length,
            q=q[b].view(kv_heads, heads // kv_heads, head_dim).float(),
            pages=page_table[b, : -(-length // page_size)].long(),
            k_pool=k_pool,
            page_size=page_size,
        )


def block_logsumexp(scores: torch.Tensor, block_size: int) -> torch.Tensor:
    """Log-sum-exp over blocks of the last dimension, the last one possibly partial: `[..., T]` to `[..., blocks]`."""
    missing = -scores.shape[-1] % block_size
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
    return scores.unflatten(-1, (-1, block_size)).logsumexp(-1)


def block_maximum(scores: torch.Tensor, block_size: int) -> torch.Tensor:
    """Largest score of blocks of the last dimension, `[..., T]` to `[..., blocks]`; +inf where one is no number."""
    missing = -scores.shape[-1] % block_size
    scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
    return torch.where(scores.isnan(), float("inf"), scores).unflatten(-1, (-1, block_size)).amax(-1)


def token_scores(q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled scores `[Hkv, G, T]` of `q [Hkv, G, D]` and `keys [T, Hkv, D]`."""
    return torch.matmul(q, keys.permute(1, 2, 0)) * scale


def write_open_page(
    row: Row, scale: float, block_size: int, out: torch.Tensor, block_max: torch.Tensor | None = None
) -> None:
    """Writes the exact log mass of the open page's blocks to `out [B, Hkv, G, N]`, and their largest scores to
    `block_max`."""
    start = row.closed * row.page_size
    if start == row.length:
        return
    scores = token_scores(row.q, row.keys(start, row.length), scale)
    mass = block_logsumexp(scores, block_size)
    first = start // block_size
    out[row.index, :, :, first : first + mass.shape[2]] = mass
    if block_max is not None:
        block_max[row.index, :, :, first : first + mass.shape[2]] = block_maximum(scores, block_size)
