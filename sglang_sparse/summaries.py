"""Page summaries of all layers, indexed by physical page.

A page's summary depends on its keys and values alone, and a full page never changes until it is reused. So summaries
need no bookkeeping: prefix sharing, eviction and reuse of pages are right as long as a page is summarised when it
closes.
"""

from __future__ import annotations

import torch

from sglang_sparse.selection import Estimator
from sglang_sparse.selection.estimators import Summary, ThumbnailEstimator
from sglang_sparse.tail import MeanTail


class PageSummaries:
    """Summaries of the sparse layers of one model.

    Args:
        estimator: what is kept of a page.
        layers: indices of the layers that decode sparsely; others have no summaries.
        pages: physical pages of the KV pool, the padding page included.
        tail: what is kept of a page's values; None for nothing.
    """

    def __init__(
        self,
        estimator: Estimator,
        layers: list[int],
        pages: int,
        device: torch.device | str,
        tail: MeanTail | None = None,
    ) -> None:
        self.pages = pages
        self._estimator = estimator
        self._tail = tail
        self._layers: dict[int, Summary] = {layer: estimator.allocate(pages, device) for layer in layers}
        self._means = {layer: tail.allocate(pages, device) for layer in layers} if tail else {}

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for layer in self._layers for tensor in self._tensors(layer))

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def __getitem__(self, layer: int) -> Summary:
        """The estimator's summaries of a sparse layer."""
        return self._layers[layer]

    @property
    def has_tail(self) -> bool:
        return self._tail is not None

    def value_means(self, layer: int) -> torch.Tensor:
        """The tail's mean values of a sparse layer."""
        return self._means[layer]

    def update(
        self,
        layer: int,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        pages: torch.Tensor,
        targets: torch.Tensor | None = None,
    ) -> None:
        """Summarises `pages` (`[n]`, closed; negative entries are skipped) of one layer; dense layers do nothing.

        `targets` (`[n]`) are the pages that are summarised, if they have other numbers in these pools.
        """
        if layer not in self._layers:
            return
        if self._tail and isinstance(self._estimator, ThumbnailEstimator):
            means = self._means[layer]
            self._estimator.update_with_means(k_pool, v_pool, pages, self._layers[layer], means, targets)
            return
        self._estimator.update(k_pool, pages, self._layers[layer], targets)
        if self._tail:
            self._tail.update(v_pool, pages, self._means[layer], targets)

    def stale_pages(self, layer: int, k_pool: torch.Tensor, v_pool: torch.Tensor, pages: torch.Tensor) -> int:
        """How many of `pages` (`[n]`, closed) have a summary that differs from one made anew from the pools."""
        if layer not in self._layers or not len(pages):
            return 0
        fresh = PageSummaries(self._estimator, [layer], self.pages, k_pool.device, self._tail)
        fresh.update(layer, k_pool, v_pool, pages)
        differs = torch.zeros(len(pages), dtype=torch.bool, device=k_pool.device)
        for kept, made in zip(self._tensors(layer), fresh._tensors(layer), strict=True):
            differs |= (kept[pages].view(torch.uint8) != made[pages].view(torch.uint8)).flatten(1).any(1)
        return int(differs.sum())

    def _tensors(self, layer: int) -> list[torch.Tensor]:
        return [*self._layers[layer], *([self._means[layer]] if self._tail else [])]
