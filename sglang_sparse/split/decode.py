"""Sparse decode over split keys, without SGLang: estimators and rules of `DecodeStep`, the keys in its summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sparse_kernels import SplitKeys, split_attention, split_store

from sglang_sparse.geometry import Geometry
from sglang_sparse.observe.layer_clock import ATTENTION
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.own_pool_decode import OwnPoolDecode
from sglang_sparse.selection import Maxima


class SplitDecode(OwnPoolDecode):
    """A decode step whose keys are split when their page closes, and lie in a row of open pages until then.

    The estimator's summaries are the keys: codes and bounds, which it scans, and the residuals. All layers have them.

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
        self._scan_table = torch.zeros_like(self.buffers.page_table)
        """The step's page table with rows of open pages in the place of these."""

    def keys(self, layer: int, rows: slice = slice(None)) -> SplitKeys:
        """A layer's keys, for the requests `rows` of the step."""
        codes, low_step, residual = self.summaries[layer]
        return SplitKeys(codes, low_step, residual, self.open_keys[layer], self.open_pages.rows[rows])

    def _write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, pool_slots: torch.Tensor, open_slots: torch.Tensor
    ) -> None:
        split_store(k, v, pool_slots, open_slots, v_pool=self.values[layer], open_keys=self.open_keys[layer])
        if self.copies is not None:
            # Padded rows write to the padding page.
            self.copies[layer][pool_slots.clamp_min(0)] = k

    def _load(self, places: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor) -> None:
        batch = len(seq_lens)
        self._scan_table[:batch] = self.buffers.page_table[:batch]
        self.open_pages.load(places, seq_lens, rows, self._scan_table[:batch])

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        batch = q.shape[0]
        if self.clock:
            self.clock.enter(layer)
        self._write(layer, k, v, self.open_pages.pool_slots[:batch], self.open_pages.slots[:batch])
        closing = self.open_pages.closing_pages[:batch]
        self.summaries.update(
            layer,
            self.open_keys[layer],
            self.values[layer],
            self.open_pages.closing_rows[:batch],
            targets=closing,
            value_pages=closing,
        )
        for turn in self._turns(batch):
            self._decode_turn(layer, q[turn], turn, scale, out[turn])
        self._count_requests(layer, batch)

    def _write_pseudo_maximum(
        self,
        layer: int,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        page_table: torch.Tensor,
        turn: slice,
        scale: float,
        maxima: Maxima,
    ) -> None:
        # Not by `page_table`, which has rows of open pages in their place: split keys name these themselves.
        b = self.buffers
        self._pseudo_maximum.write_split(
            q,
            self.keys(layer, turn),
            b.page_table[turn],
            b.seq_lens[turn],
            scale=scale,
            min_context=self.options.min_context,
            maxima=maxima,
        )

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
