"""Prefill stays with SGLang's own backend; this summarises the pages that each prefill chunk closed.

SGLang's hybrid backend sends every prefill to its prefill backend, so that is where the summaries are hooked in:
the backend object gets a subclass of its own class, and keeps its identity and attributes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from sglang_sparse.summaries import PageSummaries


def closing_token_indices(prefix_lens: list[int], extend_lens: list[int], page_size: int) -> list[int]:
    """Indices into a chunk's tokens, over all requests, of those that fill a page.

    `prefix_lens` and `extend_lens` are tokens already cached and tokens in this chunk, per request.
    """
    indices: list[int] = []
    starts = itertools.accumulate(extend_lens, initial=0)
    for prefix, extend, start in zip(prefix_lens, extend_lens, starts, strict=False):
        first = -(prefix + 1) % page_size
        indices.extend(range(start + first, start + extend, page_size))
    return indices


def _closed_pages(forward_batch: Any, page_size: int) -> torch.Tensor | None:
    """Physical pages (`[n]` int64) that the chunk fills, without a host synchronisation; None if there are none."""
    if not forward_batch.forward_mode.is_extend() or forward_batch.extend_seq_lens_cpu is None:
        return None
    indices = closing_token_indices(
        [int(length) for length in forward_batch.extend_prefix_lens_cpu],
        [int(length) for length in forward_batch.extend_seq_lens_cpu],
        page_size,
    )
    if not indices:
        return None
    slots = forward_batch.out_cache_loc
    chosen = torch.tensor(indices, dtype=torch.int64, pin_memory=slots.is_cuda)
    return slots[chosen.to(slots.device, non_blocking=True)] // page_size


def summarise_prefill(
    backend: Any, summaries: PageSummaries, page_size: int, before_chunk: Callable[[], None] = lambda: None
) -> None:
    """Makes `backend`, SGLang's prefill attention backend, summarise the pages its prefill chunks close.

    `before_chunk` is called before a chunk writes keys.
    """
    kind: Any = type(backend)

    class Summarising(kind):
        closed_pages: torch.Tensor | None = None
        summarised_layers = 0

        def init_forward_metadata(self, forward_batch: Any) -> None:
            before_chunk()
            super().init_forward_metadata(forward_batch)
            self.closed_pages = _closed_pages(forward_batch, page_size)
            self.summarised_layers = 0

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
        ) -> Any:
            out = super().forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)
            if self.closed_pages is not None:
                keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
                summaries.update(layer.layer_id, keys, values, self.closed_pages)
                self.summarised_layers += 1
            return out

    Summarising.__name__ = f"Summarising{kind.__name__}"
    backend.__class__ = Summarising


def check_prefill(backend: Any, layers: int) -> None:
    """Raises RuntimeError if the last chunk that `backend` announced closed pages without summaries in all `layers`.

    That would mean that SGLang ran prefill attention past the backend object, in a captured graph for example.
    """
    if backend.closed_pages is not None and backend.summarised_layers < layers:
        raise RuntimeError(
            "the last prefill left pages without summaries: use --disable-prefill-cuda-graph or no --sparse-decode"
        )
