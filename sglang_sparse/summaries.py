"""Page summaries of all layers, indexed by physical page.

A page's summary depends on its keys and values alone, and a full page never changes until it is reused. So summaries
need no bookkeeping: prefix sharing, eviction and reuse of pages are right as long as a page is summarised when it
closes.
"""

from __future__ import annotations

import itertools

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

    Raises:
        torch.OutOfMemoryError: naming what they take together.
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
        try:
            self._layers: dict[int, Summary] = {layer: estimator.allocate(pages, device) for layer in layers}
            self._means = {layer: tail.allocate(pages, device) for layer in layers} if tail else {}
        except torch.OutOfMemoryError as error:
            one = [*estimator.allocate(pages, "meta"), *([tail.allocate(pages, "meta")] if tail else [])]
            size = len(layers) * sum(tensor.nbytes for tensor in one)
            raise torch.OutOfMemoryError(f"page summaries of {pages} pages take {size / 1e9:.2f} GB; {error}") from None

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
        value_pages: torch.Tensor | None = None,
    ) -> None:
        """Summarises `pages` (`[n]`, closed; negative entries are skipped) of one layer; dense layers do nothing.

        `targets` (`[n]`) are the pages that are summarised, if they have other numbers in these pools. `value_pages`
        (`[n]`) are those of `v_pool`, if it numbers its pages as summaries do and not as `k_pool` does.
        """
        if layer not in self._layers:
            return
        estimator = self._estimator
        if self._tail and value_pages is None and isinstance(estimator, ThumbnailEstimator) and estimator.joins_means:
            means = self._means[layer]
            estimator.update_with_means(k_pool, v_pool, pages, self._layers[layer], means, targets)
            return
        self._estimator.update(k_pool, pages, self._layers[layer], targets)
        if not self._tail:
            return
        if value_pages is not None:
            self._tail.update(v_pool, value_pages, self._means[layer])
        else:
            self._tail.update(v_pool, pages, self._means[layer], targets)

    def update_chunk(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        pool_slots: torch.Tensor,
        lengths: list[int],
        page_size: int,
    ) -> None:
        """Summarises the pages that a prefill batch fills, from its new tokens.

        Args:
            k, v: `[T, Hkv, D]`, the requests' tokens one after another; those of each begin with a page.
            pool_slots: `[T]` int64, their places in the pool.
            lengths: tokens of each request in the chunk; sum `T`.
        """
        for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
            full = length // page_size
            if full:
                own = slice(start, start + full * page_size)
                targets = pool_slots[own][::page_size] // page_size
                self.update(layer, k[own], v[own], torch.arange(full, device=k.device), targets.contiguous())

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
