"""Sparse decode over split keys, without SGLang: estimators and rules of `DecodeStep`, the keys in its summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sparse_kernels import SplitKeys, split_attention, split_store

from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.observe.layer_clock import ATTENTION
from sglang_sparse.open_pages import OpenPages, padded_places, point_at_rows
from sglang_sparse.options import SparseDecodeOptions


class SplitDecode(DecodeStep):
    """`DecodeStep` whose keys are split when their page closes, and lie in a row of open pages until then.

    The estimator's summaries are the keys: codes and bounds, which it scans, and the residuals. All layers have them.
    Prefill gives chunks to `write_chunk`; a step calls `load`, then `decode` for each layer. A request's chunk begins
    with a page, as prefixes and chunks of SGLang's prefill do.

    Args:
        values: of each layer, `[pages * page_size, Hkv, D]`.
        rows: requests that may be decoding; each keeps the row of open pages that `load` is given.
        keeps_copies: whether all keys are kept as they are too, for checks.
        options: with `kv_format` split.
        geometry, max_requests, max_pages, device: as for `DecodeStep`.
    """

    def __init__(
        self,
        options: SparseDecodeOptions,
        geometry: Geometry,
        *,
        values: Sequence[torch.Tensor],
        rows: int,
        max_requests: int,
        max_pages: int,
        device: torch.device | str,
        keeps_copies: bool = False,
        **more: Any,
    ) -> None:
        assert options.kv_format == "split"
        super().__init__(
            options,
            geometry,
            layers=len(values),
            pages=len(values[0]) // geometry.page_size,
            max_requests=max_requests,
            max_pages=max_pages,
            device=device,
            **more,
        )
        g = geometry
        self.values = values
        shape = (len(values), rows * g.page_size, g.kv_heads, g.head_dim)
        self.open_keys = torch.zeros(shape, dtype=g.dtype, device=device)
        self.copies = [torch.zeros_like(each) for each in values] if keeps_copies else None
        self._open = OpenPages(g.page_size, max_requests, device)
        self._closing_rows = torch.full((max_requests,), -1, dtype=torch.int32, device=device)
        self._scan_table = torch.zeros_like(self.buffers.page_table)
        """The step's page table with rows of open pages in the place of these."""

    def keys(self, layer: int, rows: slice = slice(None)) -> SplitKeys:
        """A layer's keys, for the requests `rows` of the step."""
        codes, low_step, residual = self.summaries[layer]
        return SplitKeys(codes, low_step, residual, self.open_keys[layer], self._open.rows[rows])

    def write_chunk(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        pool_slots: torch.Tensor,
        open_slots: torch.Tensor,
        lengths: list[int],
    ) -> None:
        """Stores a prefill batch's new keys and values, and splits the keys of the pages that they fill.

        Args:
            k, v: `[T, Hkv, D]`, the requests' tokens one after another.
            pool_slots: `[T]` int64, their places in the pool.
            open_slots: `[T]` int32, where tokens of each request's last page go in the open pages; negative for others.
            lengths: tokens of each request in the chunk; sum `T`.
        """
        self._store(layer, k, v, pool_slots, open_slots)
        self.summaries.update_chunk(layer, k, v, pool_slots, lengths, self.geometry.page_size)

    def _store(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, pool_slots: torch.Tensor, open_slots: torch.Tensor
    ) -> None:
        split_store(k, v, pool_slots, open_slots, v_pool=self.values[layer], open_keys=self.open_keys[layer])
        if self.copies is not None:
            # Padded rows write to the padding page.
            self.copies[layer][pool_slots.clamp_min(0)] = k

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
        b, batch = self.buffers, len(seq_lens)
        b.load(req_to_token, req_pool_indices, seq_lens)
        lengths = b.seq_lens[:batch]
        places = padded_places(places, batch)
        self._open.load(places, lengths, rows)
        closing = b.closing_pages[:batch]
        closing.copy_(torch.where(closing >= 0, places // self.geometry.page_size, -1))
        self._closing_rows[:batch] = torch.where(b.closing_pages[:batch] >= 0, rows, -1)
        self._scan_table[:batch] = b.page_table[:batch]
        point_at_rows(self._scan_table[:batch], lengths, rows, self.geometry.page_size)

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        """One layer of the step that `load` announced.

        Args:
            q: `[B, Hq, D]`.
            k, v: `[B, Hkv, D]`, of the new tokens.
            out: `[B, Hq, D]`, written; zeros for padded rows.
        """
        batch = q.shape[0]
        if self.clock:
            self.clock.enter(layer)
        self._store(layer, k, v, self._open.pool_slots[:batch], self._open.slots[:batch])
        closing = self.buffers.closing_pages[:batch]
        self.summaries.update(
            layer,
            self.open_keys[layer],
            self.values[layer],
            self._closing_rows[:batch],
            targets=closing,
            value_pages=closing,
        )
        for start in range(0, batch, self.buffers.turn):
            turn = slice(start, min(start + self.buffers.turn, batch))
            self._decode_turn(layer, q[turn], turn, scale, out[turn])
        self._count_requests(layer, batch)

    def _decode_turn(self, layer: int, q: torch.Tensor, turn: slice, scale: float, out: torch.Tensor) -> None:
        b, g = self.buffers, self.geometry
        lists, counts, tail = self._select(
            layer, q, self.open_keys[layer], turn, scale, page_table=self._scan_table[turn]
        )
        split_attention(
            q,
            self.keys(layer, turn),
            self.values[layer],
            b.page_table[turn],
            b.seq_lens[turn],
            lists,
            counts,
            scale=scale,
            page_size=g.page_size,
            block_size=g.block_size,
            out=out,
            workspace=b.attention,
            tail=tail,
        )
        if self.clock:
            self.clock.end(layer, ATTENTION)
