"""From expected queries to a ranking of blocks, by what a server could keep of their keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from sparse_kernels import thumbnail
from sparse_kernels.block_score_strided import STRIDE
from sparse_kernels.thumbnail import unpack_codes

Masses = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(vectors `[T, Hkv, R, D]`, keys `[N * block, Hkv, D]`, scale) to log masses `[T, Hkv, R, N]` of blocks."""


def by_block_mean(block: int) -> Masses:
    """Products with the mean key of each block."""
    return _by_mean(block, 1, block)


def by_page_mean(page: int, block: int) -> Masses:
    """Products with the mean key of each page: its blocks are alike."""
    return _by_mean(page, page // block, block)


def _by_mean(tokens: int, blocks: int, block: int) -> Masses:
    def masses(vectors: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        means = keys.float().unflatten(0, (-1, tokens)).mean(1).repeat_interleave(blocks, 0)
        return torch.einsum("thrd,nhd->thrn", vectors, means) * scale + math.log(block)

    return masses


def by_window_mean(page: int, block: int) -> Masses:
    """As SparDA: the largest product with the mean of one of the windows of 32 keys, at stride 16, that overlap a page:
    its blocks are alike."""

    def masses(vectors: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        means = keys.float().unflatten(0, (-1, STRIDE)).mean(1)
        scores = torch.einsum("thrd,nhd->thrn", vectors, means) * scale
        windows = torch.nn.functional.pad((scores[..., :-1] + scores[..., 1:]) / 2, (1, 1), value=float("-inf"))
        highest = windows.unfold(-1, page // STRIDE + 1, page // STRIDE).amax(-1) + math.log(block)
        return highest.repeat_interleave(page // block, -1)

    return masses


def by_page_midpoint(page: int, block: int) -> Masses:
    """Products with the middle between a page's lowest and highest key, channel by channel, which thumbnails keep."""

    def masses(vectors: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        low, high = keys.float().unflatten(0, (-1, page)).aminmax(dim=1)
        middle = ((low + high) / 2).repeat_interleave(page // block, 0)
        return torch.einsum("thrd,nhd->thrn", vectors, middle) * scale + math.log(block)

    return masses


def by_thumbnail(bits: int, page: int, block: int) -> Masses:
    """The estimator `thumbnail` itself: the log of the sum over a block's tokens."""

    def masses(vectors: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        pages, heads, size = len(keys) // page, *keys.shape[1:]
        device = keys.device
        codes = torch.zeros((pages, heads, page, size * bits // 8), dtype=torch.uint8, device=device)
        low_step = torch.zeros((pages, heads, 2, size), dtype=torch.bfloat16, device=device)
        numbers = torch.arange(pages, dtype=torch.int32, device=device)
        thumbnail(keys.contiguous(), numbers, bits=bits, page_size=page, codes=codes, low_step=low_step)
        low, step = low_step.float().unbind(2)
        rough = low[:, :, None] + step[:, :, None] * unpack_codes(codes, bits, size).float()
        rough = rough.transpose(1, 2).flatten(0, 1)
        scores = torch.einsum("thrd,nhd->thrn", vectors, rough) * scale
        return scores.unflatten(-1, (-1, block)).logsumexp(-1)

    return masses


def open_mass(
    vectors: torch.Tensor, keys: torch.Tensor, candidates: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """Log masses of the tokens between the candidates and each step's own: `[T, Hkv, R, 1]`; -inf if there are none.

    A server has their keys as they are. The step's own is not there yet.

    Args:
        vectors, keys, scale: as for `Masses`.
        candidates: `[T, N]` bool, the blocks of full pages.
        positions: `[T]`, of each step's own token.
    """
    full = candidates.sum(-1) * (len(keys) // candidates.shape[1])
    first = int(full.min())
    tokens = torch.arange(first, len(keys), device=keys.device)
    seen = (tokens >= full[:, None]) & (tokens < positions[:, None])
    scores = torch.einsum("thrd,nhd->thrn", vectors, keys[first:].float()) * scale
    return scores.masked_fill(~seen[:, None, None], float("-inf")).logsumexp(-1, keepdim=True)


def mean_shares(masses: torch.Tensor, candidates: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Expected share of the attention in each block, mean over R vectors: `[T, Hkv, N]`; 0 for other blocks.

    Args:
        masses: `[T, Hkv, R, N]`.
        candidates: `[T, N]` bool.
        others: `[T, Hkv, R, 1]`, of what else attention goes to.
    """
    masses = masses.masked_fill(~candidates[:, None, None], float("-inf"))
    return torch.cat((masses, others), -1).softmax(-1)[..., :-1].mean(2)
