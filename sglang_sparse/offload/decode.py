"""Sparse decode under offload, without SGLang: estimators and rules of `DecodeStep` over summaries and open pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.forecast.lookahead import Lookahead
from sglang_sparse.geometry import Geometry
from sglang_sparse.observe.layer_clock import ATTENTION
from sglang_sparse.offload.pools import HostPool, HotCache
from sglang_sparse.offload.step import OffloadStep
from sglang_sparse.offload.streams import Streams
from sglang_sparse.open_pages import padded_places, point_at_rows
from sglang_sparse.options import FLOAT8_HOST, SparseDecodeOptions


class OffloadedDecode(DecodeStep):
    """`DecodeStep` whose keys and values are in a host pool, slots and open pages.

    Prefill gives chunks to `write_chunk`; a step calls `load`, then `decode` for each layer. A request's chunk begins
    with a page, as prefixes and chunks of SGLang's prefill do.

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
            max_requests=max_requests,
            max_blocks=max_pages * geometry.blocks_per_page,
            streams=streams,
            workspace=self.buffers.attention,
        )
        self.lookahead: Lookahead | None = None
        """What prefetches, if anything does."""
        self._batch = 0
        self._closing_rows = torch.full((max_requests,), -1, dtype=torch.int32, device=device)

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
        self.offload.write(layer, k, v, pool_slots, open_slots)
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

        Arguments as for `DecodeBuffers.load`; `rows [B]` int32 are the requests' rows of open pages, `places`
        where the pool's owner put their new tokens, at least those of the rows before the padded ones. What is written
        goes there and not where the request table says: the row of a request that has ended may be another's by now,
        with a cached prefix in that place.
        """
        b, g, batch = self.buffers, self.geometry, len(seq_lens)
        b.load(req_to_token, req_pool_indices, seq_lens)
        places = padded_places(places, batch)
        self.offload.load(places, b.seq_lens[:batch], rows)
        if self.lookahead:
            self.lookahead.begin(batch)
        closing = b.closing_pages[:batch]
        closing.copy_(torch.where(closing >= 0, places // g.page_size, -1))
        self._closing_rows[:batch] = torch.where(b.closing_pages[:batch] >= 0, rows, -1)
        # Of the entry of an open page nobody but estimators reads anything.
        point_at_rows(b.page_table[:batch], b.seq_lens[:batch], rows, g.page_size)

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        """One layer of the step that `load` announced.

        Args:
            q: `[B, Hq, D]`.
            k, v: `[B, Hkv, D]`, of the new tokens.
            out: `[B, Hq, D]`, written; zeros for padded rows.
        """
        batch, cache = q.shape[0], self.cache
        self._batch = batch
        if layer == 0:
            self.offload.begin()
        if self.lookahead:
            self.lookahead.score(layer)
        if self.clock:
            self.clock.enter(layer)
        self.offload.store(layer, k, v)
        open_k, open_v = cache.open_k[layer], cache.open_v[layer]
        self.offload.streams.operation("summarise", reads=[("open", layer)], writes=[("summaries", layer)])
        self.summaries.update(
            layer, open_k, open_v, self._closing_rows[:batch], targets=self.buffers.closing_pages[:batch]
        )
        for start in range(0, batch, self.buffers.turn):
            turn = slice(start, min(start + self.buffers.turn, batch))
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
            open_rows=self.offload.open_rows[turn],
        )
        if self.clock:
            self.clock.end(layer, ATTENTION)
