"""What stands for the blocks that a step does not read: mean values, weighted by the blocks' estimated mass."""

from __future__ import annotations

import torch
from sparse_kernels import block_statistics

from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions

CELL_TOKENS = 64
"""Tokens that share a mean value; smaller pages have one."""


class MeanTail:
    """Mean values of closed pages, with which attention is completed. Owns no state."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self.cell = min(CELL_TOKENS, geometry.page_size)

    def allocate(self, pages: int, device: torch.device | str) -> torch.Tensor:
        """Zeroed mean values of one layer with `pages` physical pages: `[P, Hkv, cells of a page, D]`."""
        g = self._geometry
        shape = (pages, g.kv_heads, g.page_size // self.cell, g.head_dim)
        return torch.zeros(shape, dtype=g.dtype, device=device)

    def summary_bytes(self) -> float:
        """Bytes a token that the mean values of one layer and KV head take; a step reads all of closed pages'."""
        g = self._geometry
        return g.head_dim * g.dtype.itemsize / self.cell

    def update(
        self, v_pool: torch.Tensor, pages: torch.Tensor, means: torch.Tensor, targets: torch.Tensor | None = None
    ) -> None:
        """Writes the means of `pages` (`[n]`, physical, closed; negative entries are skipped), into `targets` (`[n]`)
        if the pool's pages have other numbers."""
        page_size = self._geometry.page_size
        block_statistics(
            v_pool,
            pages,
            kind="mean",
            page_size=page_size,
            block_size=self.cell,
            out=means[:, :, :, None],
            targets=targets,
        )


def make_tail(options: SparseDecodeOptions, geometry: Geometry) -> MeanTail | None:
    """The tail that `options` name; None if blocks that are not read are dropped."""
    return MeanTail(geometry) if options.resolved_tail == "mean" else None
