"""Sparse decode under offload, without SGLang: estimators and rules of `DecodeStep` over summaries and open pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_sparse.forecast.lookahead import Lookahead
from sglang_sparse.geometry import Geometry
from sglang_sparse.observe.layer_clock import ATTENTION
from sglang_sparse.offload.pools import HostPool, HotCache
from sglang_sparse.offload.step import OffloadStep
from sglang_sparse.offload.streams import Streams
from sglang_sparse.options import FLOAT8_HOST, SparseDecodeOptions
from sglang_sparse.own_pool_decode import OwnPoolDecode


class OffloadedDecode(OwnPoolDecode):
    """A decode step whose keys and values are in a host pool, slots and open pages.

    Args:
        pages: of the host pool, the padding page included.
        slots: of each layer, for each KV head.
        rows: requests that may be decoding; each keeps the row of open pages that `load` is given.
        options: with `offload`.
        geometry, max_requests, max_pages, device: as for `DecodeStep`.

    Raises:
        OffloadError: the host memory cannot be had.
    """

    def __init__(
        self,
        options: SparseDecodeOptions,
        geometry: Geometry,
        *,
        pages: int,
        slots: Sequence[int],
        rows: int,
        max_requests: int,
        max_pages: int,
        device: torch.device | str,
        streams: Streams | None = None,
        **more: Any,
    ) -> None:
        assert options.offload
        super().__init__(
            options,
            geometry,
            layers=len(slots),
            pages=pages,
            max_requests=max_requests,
            max_pages=max_pages,
            device=device,
            **more,
        )
        float8 = options.host_dtype == FLOAT8_HOST
        self.host = HostPool(geometry, layers=len(slots), pages=pages, device=device, float8=float8)
        self.cache = HotCache(geometry, pages=pages, slots=slots, rows=rows, device=device)
        self.offload = OffloadStep(
            self.cache,
            self.host,
            open_pages=self.open_pages,
            max_blocks=max_pages * geometry.blocks_per_page,
            streams=streams,
            workspace=self.buffers.attention,
        )
        self.lookahead: Lookahead | None = None
        """What prefetches, if anything does."""
        self._batch = 0

    @property
    def offload_totals(self) -> torch.Tensor:
        return self.cache.totals

    @property
    def forecast_totals(self) -> torch.Tensor | None:
        return self.lookahead.totals if self.lookahead else None

    @property
    def missed_block_bytes(self) -> int:
        block = self.host.blocks[0, 0, 0, 0]
        return block.numel() * block.element_size()

    def _write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, pool_slots: torch.Tensor, open_slots: torch.Tensor
    ) -> None:
        self.offload.write(layer, k, v, pool_slots, open_slots)

    def _load(self, places: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor) -> None:
        batch = len(seq_lens)
        # Of the entry of an open page nobody but estimators reads anything.
        self.open_pages.load(places, seq_lens, rows, self.buffers.page_table[:batch])
        if self.lookahead:
            self.lookahead.begin(batch)
        if self.chooser:
            self.chooser.begin(batch)

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        batch, cache = q.shape[0], self.cache
        self._batch = batch
        if layer == 0:
            self.offload.begin()
            if self.lookahead:
                self.lookahead.plan()
        if self.lookahead:
            self.lookahead.arrive(layer)
            self.lookahead.score(layer)
        if self.clock:
            self.clock.enter(layer)
        self.offload.store(layer, k, v)
        open_k, open_v = cache.open_k[layer], cache.open_v[layer]
        self.offload.streams.operation("summarise", reads=[("open", layer)], writes=[("summaries", layer)])
        self.summaries.update(
            layer,
            open_k,
            open_v,
            self.open_pages.closing_rows[:batch],
            targets=self.open_pages.closing_pages[:batch],
        )
        for turn in self._turns(batch):
            self._decode_turn(layer, q[turn], turn, scale, out[turn])
        self._count_requests(layer, batch)

    def _decode_turn(self, layer: int, q: torch.Tensor, turn: slice, scale: float, out: torch.Tensor) -> None:
        b = self.buffers
        page_table, seq_lens = b.page_table[turn], b.seq_lens[turn]
        lists, counts, tail = self._select(layer, q, self.cache.open_k[layer], turn, scale)
        assert lists is not None
        assert counts is not None
        self.offload.fetch(layer, page_table, seq_lens, lists, counts)
        if self.lookahead and turn.stop == self._batch:
            self.lookahead.fetch(layer)
        self.offload.attend(
            layer,
            q,
            page_table,
            seq_lens,
            lists,
            counts,
            scale=scale,
            out=out,
            tail=tail,
            open_rows=self.open_pages.rows[turn],
        )
        if self.clock:
            self.clock.end(layer, ATTENTION)
