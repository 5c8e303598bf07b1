"""Page summaries of all layers, indexed by physical page.

A page's summary depends on its keys alone, and a full page never changes until it is reused. So summaries need no
bookkeeping: prefix sharing, eviction and reuse of pages are right as long as a page is summarised when it closes.
"""

from __future__ import annotations

import torch

from sglang_sparse.selection import Estimator
from sglang_sparse.selection.estimators import Summary


class PageSummaries:
    """Summaries of the sparse layers of one model.

    Args:
        estimator: what is kept of a page.
        layers: indices of the layers that decode sparsely; others have no summaries.
        pages: physical pages of the KV pool, the padding page included.
    """

    def __init__(self, estimator: Estimator, layers: list[int], pages: int, device: torch.device | str) -> None:
        self.pages = pages
        self._estimator = estimator
        self._layers: dict[int, Summary] = {layer: estimator.allocate(pages, device) for layer in layers}

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for summary in self._layers.values() for tensor in summary)

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def __getitem__(self, layer: int) -> Summary:
        return self._layers[layer]

    def update(self, layer: int, k_pool: torch.Tensor, pages: torch.Tensor) -> None:
        """Summarises `pages` (`[n]`, closed; negative entries are skipped) of one layer; dense layers do nothing."""
        summary = self._layers.get(layer)
        if summary:
            self._estimator.update(k_pool, pages, summary)

    def stale_pages(self, layer: int, k_pool: torch.Tensor, pages: torch.Tensor) -> int:
        """How many of `pages` (`[n]`, closed) have a summary that differs from one made anew from `k_pool`."""
        summary = self._layers.get(layer)
        if not summary or not len(pages):
            return 0
        fresh = self._estimator.allocate(self.pages, k_pool.device)
        self._estimator.update(k_pool, pages, fresh)
        differs = torch.zeros(len(pages), dtype=torch.bool, device=k_pool.device)
        for kept, made in zip(summary, fresh, strict=True):
            differs |= (kept[pages].view(torch.uint8) != made[pages].view(torch.uint8)).flatten(1).any(1)
        return int(differs.sum())
