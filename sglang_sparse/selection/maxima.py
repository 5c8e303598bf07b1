"""What rule `top-delta` compares: each block's largest score, and each head's pseudo-maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sparse_kernels import SplitKeys, pseudo_maximum, split_maximum

from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions


@dataclass(frozen=True)
class Maxima:
    """Static buffers for a turn of requests, in nats."""

    blocks: torch.Tensor
    """`[B, Hkv, G, N]` fp32: largest score of each block, as the estimator sees it."""
    pseudo: torch.Tensor
    """`[B, Hkv, G]` fp32: largest score over the forced blocks, by their keys as attention reads them."""

    @classmethod
    def create(cls, requests: int, geometry: Geometry, blocks: int, device: torch.device | str) -> Maxima:
        """Buffers for `requests` requests of at most `blocks` blocks."""
        shape = (requests, geometry.kv_heads, geometry.group_size)
        return cls(
            torch.empty((*shape, blocks), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    def rows(self, rows: slice) -> Maxima:
        """Those of some requests."""
        return Maxima(self.blocks[rows], self.pseudo[rows])


class PseudoMaximum:
    """The forced blocks' largest scores, the same whatever the estimator."""

    def __init__(self, options: SparseDecodeOptions, geometry: Geometry) -> None:
        self._sizes: dict[str, Any] = {
            "page_size": geometry.page_size,
            "block_size": geometry.block_size,
            "sink_tokens": options.sink_tokens,
            "window_tokens": options.window_tokens,
        }

    def write(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        min_context: int,
        maxima: Maxima,
    ) -> None:
        """Writes `maxima.pseudo` of the rows of at least `min_context` tokens."""
        pseudo_maximum(
            q, k_pool, page_table, seq_lens, scale=scale, min_context=min_context, out=maxima.pseudo, **self._sizes
        )

    def write_split(
        self,
        q: torch.Tensor,
        keys: SplitKeys,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        min_context: int,
        maxima: Maxima,
    ) -> None:
        """The same from split keys: of closed pages what codes and residuals stand for, as attention reads them."""
        split_maximum(
            q, keys, page_table, seq_lens, scale=scale, min_context=min_context, out=maxima.pseudo, **self._sizes
        )
