"""Estimator `strided-mean`: SparDA's key summaries, means of 32 keys at stride 16, max-pooled to blocks.

It ranks blocks and guesses no mass: only rule top-k can use it.
"""

from __future__ import annotations

import torch
from sparse_kernels import block_score_strided, block_statistics
from sparse_kernels.block_score_strided import STRIDE

from sglang_sparse.geometry import Geometry
from sglang_sparse.selection_options import STRIDED_MEAN


class StridedMeanEstimator:
    """Keeps the means of 16 keys, of which windows of 32 are made while scoring; see `Estimator`."""

    name = STRIDED_MEAN

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def allocate(self, pages: int, device: torch.device | str) -> tuple[torch.Tensor, ...]:
        g = self._geometry
        shape = (pages, g.kv_heads, g.page_size // STRIDE, 1, g.head_dim)
        return (torch.zeros(shape, dtype=g.dtype, device=device),)

    def summary_bytes(self) -> float:
        g = self._geometry
        return g.head_dim * g.dtype.itemsize / STRIDE

    def scan_bytes(self) -> float:
        return self.summary_bytes()

    def update(
        self,
        k_pool: torch.Tensor,
        pages: torch.Tensor,
        summary: tuple[torch.Tensor, ...],
        targets: torch.Tensor | None = None,
    ) -> None:
        page_size = self._geometry.page_size
        block_statistics(
            k_pool, pages, kind="mean", page_size=page_size, block_size=STRIDE, out=summary[0], targets=targets
        )

    def block_mass(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        summary: tuple[torch.Tensor, ...],
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        min_context: int,
        out: torch.Tensor,
        block_max: torch.Tensor | None = None,
    ) -> None:
        """Scores in place of masses; -inf for blocks of the open page, which are read whatever they have."""
        if block_max is not None:
            raise ValueError(f"estimator {self.name} guesses no scores of tokens")
        g = self._geometry
        block_score_strided(
            q,
            summary[0],
            page_table,
            seq_lens,
            scale=scale,
            page_size=g.page_size,
            block_size=g.block_size,
            min_context=min_context,
            out=out,
        )
