"""Decode steps over a KV pool of our own, without SGLang: what offload and split keys have in common."""

from __future__ import annotations

from typing import Any

import torch

from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.open_pages import OpenPages


class OwnPoolDecode(DecodeStep):
    """A `DecodeStep` that stores keys and values itself, those of each request's last page in a row of open pages.

    Prefill gives chunks to `write_chunk`; a step calls `load`, then `decode` for each layer. A request's chunk begins
    with a page, as prefixes and chunks of SGLang's prefill do. Arguments as for `DecodeStep`.
    """

    def __init__(self, *arguments: Any, max_requests: int, device: torch.device | str, **more: Any) -> None:
        super().__init__(*arguments, max_requests=max_requests, device=device, **more)
        self.open_pages = OpenPages(self.geometry.page_size, max_requests, device)

    def write_chunk(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        pool_slots: torch.Tensor,
        open_slots: torch.Tensor,
        lengths: list[int],
    ) -> None:
        """Stores a prefill batch's new keys and values, and summarises the pages that they fill.

        Args:
            k, v: `[T, Hkv, D]`, the requests' tokens one after another.
            pool_slots: `[T]` int64, their places in the pool.
            open_slots: `[T]` int32, where tokens of each request's last page go in the open pages; negative for others.
            lengths: tokens of each request in the chunk; sum `T`.
        """
        self._write(layer, k, v, pool_slots, open_slots)
        self.summaries.update_chunk(layer, k, v, pool_slots, lengths, self.geometry.page_size)

    def load(
        self,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Announces a step. Runs outside the graph.

        Arguments as for `DecodeBuffers.load`; `rows [B]` are the requests' rows of open pages, `places`
        where the pool's owner put their new tokens, at least those of the rows before the padded ones. What is written
        goes there and not where the request table says: the row of a request that has ended may be another's by now,
        with a cached prefix in that place.
        """
        self.buffers.load(req_to_token, req_pool_indices, seq_lens)
        self._load(places, self.buffers.seq_lens[: len(seq_lens)], rows)

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        """One layer of the step that `load` announced.

        Args:
            q: `[B, Hq, D]`.
            k, v: `[B, Hkv, D]`, of the new tokens.
            out: `[B, Hq, D]`, written; zeros for padded rows.
        """
        raise NotImplementedError

    def _write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, pool_slots: torch.Tensor, open_slots: torch.Tensor
    ) -> None:
        """Stores a chunk's keys and values; arguments as for `write_chunk`."""
        raise NotImplementedError

    def _load(self, places: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor) -> None:
        """Fills `open_pages`; arguments as for its `load`. The buffers have the step's page table."""
        raise NotImplementedError
