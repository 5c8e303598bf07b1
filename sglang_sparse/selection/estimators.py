"""Estimators: what is kept of a closed page, and how a block's log-mass is guessed from it.

An estimator owns no state. `allocate` makes one layer's summaries, indexed by physical page; `update` fills the
given pages; `block_mass` reads them. Open pages have no summary: every estimator reads their few keys exactly.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from sparse_kernels import (
    block_mass_exact,
    block_mass_statistics,
    block_mass_thumbnail,
    block_statistics,
    page_summary,
    split_quantise,
    thumbnail,
)

from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.selection.strided_mean import StridedMeanEstimator
from sglang_sparse.selection_options import FFD, THUMBNAILS

Summary = tuple[torch.Tensor, ...]
"""One layer's summaries; the first dimension of each tensor is the physical page."""


class Estimator(Protocol):
    """Guesses the log of the sum of exp(q . k * scale) over a block's tokens, for each query head."""

    name: str

    def allocate(self, pages: int, device: torch.device | str) -> Summary:
        """Zeroed summaries of one layer with `pages` physical pages."""

    def summary_bytes(self) -> float:
        """Bytes a token that the summaries of one layer and KV head take."""

    def scan_bytes(self) -> float:
        """Bytes a token of a closed page that `block_mass` reads in one layer and KV head."""

    def update(
        self, k_pool: torch.Tensor, pages: torch.Tensor, summary: Summary, targets: torch.Tensor | None = None
    ) -> None:
        """Summarises `pages` (`[n]`, physical, closed; negative entries are skipped) of `k_pool` into those pages of
        `summary`, or into `targets` (`[n]`) if the pool's pages have other numbers."""

    def block_mass(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        summary: Summary,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        min_context: int,
        out: torch.Tensor,
        block_max: torch.Tensor | None = None,
    ) -> None:
        """Writes `out[B, Hkv, G, N]` for the rows of at least `min_context` tokens (docs/architecture.md).

        `block_max`, of the same shape, gets the largest score of each block; only estimators that guess the scores of
        tokens can write it.
        """


class ExactEstimator:
    """The true mass, from all keys: the yardstick. Reads half of the KV cache."""

    name = "exact"

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def allocate(self, pages: int, device: torch.device | str) -> Summary:
        return ()

    def summary_bytes(self) -> float:
        return 0.0

    def scan_bytes(self) -> float:
        return self._geometry.kv_bytes / 2

    def update(
        self, k_pool: torch.Tensor, pages: torch.Tensor, summary: Summary, targets: torch.Tensor | None = None
    ) -> None:
        pass

    def block_mass(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        summary: Summary,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        min_context: int,
        out: torch.Tensor,
        block_max: torch.Tensor | None = None,
    ) -> None:
        block_mass_exact(
            q,
            k_pool,
            page_table,
            seq_lens,
            scale=scale,
            page_size=self._geometry.page_size,
            block_size=self._geometry.block_size,
            min_context=min_context,
            out=out,
            block_max=block_max,
        )


class StatisticsEstimator:
    """Per-channel statistics of each block: `mean`, `mean-variance` (MOIRA's mvar) or `minmax` (Quest's bound)."""

    _VECTORS: ClassVar[dict[str, int]] = {"mean": 1, "mean-variance": 2, "minmax": 2}

    def __init__(self, geometry: Geometry, kind: str) -> None:
        self.name = kind
        self._geometry = geometry

    def allocate(self, pages: int, device: torch.device | str) -> Summary:
        g = self._geometry
        shape = (pages, g.kv_heads, g.blocks_per_page, self._VECTORS[self.name], g.head_dim)
        return (torch.zeros(shape, dtype=g.dtype, device=device),)

    def summary_bytes(self) -> float:
        g = self._geometry
        return self._VECTORS[self.name] * g.head_dim * g.dtype.itemsize / g.block_size

    def scan_bytes(self) -> float:
        return self.summary_bytes()

    def update(
        self, k_pool: torch.Tensor, pages: torch.Tensor, summary: Summary, targets: torch.Tensor | None = None
    ) -> None:
        g = self._geometry
        block_statistics(
            k_pool,
            pages,
            kind=self.name,
            page_size=g.page_size,
            block_size=g.block_size,
            out=summary[0],
            targets=targets,
        )

    def block_mass(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        summary: Summary,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        min_context: int,
        out: torch.Tensor,
        block_max: torch.Tensor | None = None,
    ) -> None:
        if block_max is not None:
            raise ValueError(f"estimator {self.name} guesses no scores of tokens")
        block_mass_statistics(
            q,
            k_pool,
            summary[0],
            page_table,
            seq_lens,
            kind=self.name,
            scale=scale,
            page_size=self._geometry.page_size,
            block_size=self._geometry.block_size,
            min_context=min_context,
            out=out,
        )


class ThumbnailEstimator:
    """A low-bit copy of every key: asymmetric codes, or symmetric ones (`ffd`), low and step per channel and page."""

    joins_means = True
    """Whether `update_with_means` is there for it."""

    def __init__(self, geometry: Geometry, bits: int, symmetric: bool = False) -> None:
        self.name = FFD if symmetric else "thumbnail"
        self._geometry = geometry
        self._bits = bits
        self._symmetric = symmetric

    def allocate(self, pages: int, device: torch.device | str) -> Summary:
        g = self._geometry
        codes = torch.zeros(
            (pages, g.kv_heads, g.page_size, g.head_dim * self._bits // 8), dtype=torch.uint8, device=device
        )
        low_step = torch.zeros((pages, g.kv_heads, 2, g.head_dim), dtype=torch.bfloat16, device=device)
        return codes, low_step

    def summary_bytes(self) -> float:
        g = self._geometry
        return g.head_dim * (self._bits / 8 + 2 * torch.bfloat16.itemsize / g.page_size)

    def scan_bytes(self) -> float:
        return self.summary_bytes()

    def update(
        self, k_pool: torch.Tensor, pages: torch.Tensor, summary: Summary, targets: torch.Tensor | None = None
    ) -> None:
        codes, low_step = summary
        thumbnail(
            k_pool,
            pages,
            bits=self._bits,
            page_size=self._geometry.page_size,
            codes=codes,
            low_step=low_step,
            symmetric=self._symmetric,
            targets=targets,
        )

    def update_with_means(
        self,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        pages: torch.Tensor,
        summary: Summary,
        means: torch.Tensor,
        targets: torch.Tensor | None = None,
    ) -> None:
        """`update`, and the mean values of the same pages into `means` `[P, Hkv, cells, D]`, in one launch."""
        codes, low_step = summary
        page_size = self._geometry.page_size
        page_summary(
            k_pool,
            v_pool,
            pages,
            bits=self._bits,
            page_size=page_size,
            cell=page_size // means.shape[2],
            codes=codes,
            low_step=low_step,
            means=means,
            symmetric=self._symmetric,
            targets=targets,
        )

    def block_mass(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        summary: Summary,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        min_context: int,
        out: torch.Tensor,
        block_max: torch.Tensor | None = None,
    ) -> None:
        codes, low_step, *_ = summary
        block_mass_thumbnail(
            q,
            k_pool,
            codes,
            low_step,
            page_table,
            seq_lens,
            bits=self._bits,
            scale=scale,
            page_size=self._geometry.page_size,
            block_size=self._geometry.block_size,
            min_context=min_context,
            out=out,
            block_max=block_max,
        )


class SplitKeyEstimator(ThumbnailEstimator):
    """A thumbnail of two bits whose summary has the residuals too, with which it is the page's keys."""

    joins_means = False

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry, 2)

    def allocate(self, pages: int, device: torch.device | str) -> Summary:
        g = self._geometry
        residual = torch.zeros((pages, g.kv_heads, g.page_size, g.head_dim), dtype=torch.uint8, device=device)
        return *super().allocate(pages, device), residual

    def summary_bytes(self) -> float:
        return super().summary_bytes() + self._geometry.head_dim

    def scan_bytes(self) -> float:
        return super().summary_bytes()

    def update(
        self, k_pool: torch.Tensor, pages: torch.Tensor, summary: Summary, targets: torch.Tensor | None = None
    ) -> None:
        codes, low_step, residual = summary
        split_quantise(
            k_pool,
            pages,
            page_size=self._geometry.page_size,
            codes=codes,
            low_step=low_step,
            residual=residual,
            targets=targets,
        )


def make_estimator(options: SparseDecodeOptions, geometry: Geometry) -> Estimator:
    """The estimator that `options` name."""
    if options.kv_format == "split":
        return SplitKeyEstimator(geometry)
    if options.estimator == "exact":
        return ExactEstimator(geometry)
    if options.estimator in THUMBNAILS:
        return ThumbnailEstimator(geometry, options.thumbnail_bits, symmetric=options.estimator == FFD)
    if options.estimator == StridedMeanEstimator.name:
        return StridedMeanEstimator(geometry)
    return StatisticsEstimator(geometry, options.estimator)
