"""Forecast and prefetch in decode steps of an offloaded cache: layer l's input names blocks of layer l + 1.

For each layer l, beside the forward stream: `score` as soon as the layer's input is there, which chooses blocks of
layer l + 1 that are in no slot, and `fetch` once layer l has fetched what it misses, so that copies which somebody
waits for go first. Both are over when layer l + 1 stores its keys. Nothing here waits for the device or branches on
data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sparse_kernels import ExpectedWorkspace, expected_blocks

from sglang_sparse.memory import requests_per_turn
from sglang_sparse.selection import make_estimator

from .protocol import Forecast

if TYPE_CHECKING:
    from sglang_sparse.offload.decode import OffloadedDecode

TOTALS = ("prefetched", "used")
"""Blocks that were prefetched, and those of them that their step went on to read."""


class Lookahead:
    """State of forecasts of one model's decode steps.

    Args:
        decode: the steps; their summaries rank blocks, so that whatever the estimator keeps of keys is used.
        scales: of each layer's attention.
        hidden: width of the inputs.
        dtype: of the inputs.
        budget: blocks that a layer's forecast may fetch in a step, over requests and KV heads.
    """

    def __init__(
        self,
        forecast: Forecast,
        decode: OffloadedDecode,
        *,
        scales: Sequence[float],
        hidden: int,
        dtype: torch.dtype,
        budget: int,
    ) -> None:
        self.forecast = forecast
        self._decode = decode
        self._scales = scales
        self._budget = budget
        b = decode.buffers
        g = self._geometry = dataclasses.replace(decode.geometry, group_size=forecast.per_head)
        self._estimator = make_estimator(decode.options, g)
        pages = b.page_table.shape[1]
        blocks = pages * g.blocks_per_page
        self.turn = requests_per_turn(g, pages, b.max_requests, False)
        device = b.page_table.device
        # Of two layers: the input of one is written while that of the last may still be read.
        self._inputs = torch.zeros((2, b.max_requests, hidden), dtype=dtype, device=device)
        self._log_mass = torch.zeros((self.turn, g.kv_heads, g.group_size, blocks), device=device)
        self._expected = ExpectedWorkspace.create(self.turn, g.kv_heads, blocks, device)
        self._lists = torch.zeros((b.max_requests, g.kv_heads, blocks), dtype=torch.int32, device=device)
        self._counts = torch.zeros((b.max_requests, g.kv_heads), dtype=torch.int32, device=device)
        self.totals = torch.zeros((decode.layers, len(TOTALS)), dtype=torch.int64, device=device)
        """`[layers, 2]` since start, see `TOTALS`."""
        self._batch = 0
        self._noted: int | None = None
        self._fetched: int | None = None

    def begin(self, batch: int) -> None:
        """A decode step of so many requests follows; 0: something else, whose inputs are not noted."""
        self._batch = batch
        self._noted = None

    def note(self, layer: int, x: torch.Tensor) -> None:
        """The normed input `[B, hidden]` of a layer's query projection, of which a decode step keeps a copy."""
        if not self._batch or len(x) != self._batch or layer + 1 not in self.forecast:
            return
        self._decode.offload.streams.operation("note input", reads=(), writes=[("input", layer % 2)])
        self._inputs[layer % 2, : self._batch].copy_(x)
        self._noted = layer

    def score(self, layer: int) -> None:
        """Chooses the blocks of `layer + 1` to prefetch. To be called in `layer`, whose input has been noted."""
        if self._noted != layer:
            return
        offload, following = self._decode.offload, layer + 1
        with offload.beside(following):
            reads = [(name, following) for name in ("summaries", "maps", "open")]
            offload.streams.operation("score", reads=[("input", layer % 2), *reads], writes=["expected lists"])
            for start in range(0, self._batch, self.turn):
                self._score_turn(following, slice(start, min(start + self.turn, self._batch)))

    def fetch(self, layer: int) -> None:
        """Prefetches what `score` chose. To be called in `layer` once it has fetched what it misses."""
        offload, b = self._decode.offload, self._decode.buffers
        if self._noted != layer:
            # Nothing runs beside the forward stream any more.
            self._count(layer)
            return
        following = layer + 1
        with offload.beside(following):
            self._count(layer)
            offload.bring_expected(
                following,
                b.page_table[: self._batch],
                b.seq_lens[: self._batch],
                self._lists[: self._batch],
                self._counts[: self._batch],
            )
        self._noted, self._fetched = None, following

    def _score_turn(self, layer: int, turn: slice) -> None:
        b, g, cache = self._decode.buffers, self._geometry, self._decode.cache
        page_table, seq_lens = b.page_table[turn], b.seq_lens[turn]
        rows, min_context = turn.stop - turn.start, self._decode.options.min_context
        vectors = self.forecast.vectors(layer, self._inputs[(layer - 1) % 2, turn], (seq_lens - 1).long())
        log_mass = self._log_mass[:rows]
        self._estimator.block_mass(
            vectors.flatten(1, 2).to(g.dtype),
            cache.open_k[layer],
            self._decode.summaries[layer],
            page_table,
            seq_lens,
            scale=self._scales[layer],
            min_context=min_context,
            out=log_mass,
        )
        expected_blocks(
            log_mass,
            page_table,
            seq_lens,
            cache.maps[layer].slot_map,
            # A turn's part of what the layer may fetch.
            budget=max(1, self._budget * rows // self._batch),
            page_size=g.page_size,
            block_size=g.block_size,
            min_context=min_context,
            workspace=self._expected,
            block_lists=self._lists[turn],
            block_counts=self._counts[turn],
        )

    def _count(self, layer: int) -> None:
        """Adds up what was prefetched for `layer`, once its misses have been fetched: what it read has this epoch's
        stamp, and what was put out meanwhile is not in its slot any more."""
        if self._fetched != layer:
            return
        self._fetched = None
        decode, g = self._decode, self._geometry
        fetch, maps = decode.cache.expected, decode.cache.maps[layer]
        if not maps.slots:
            return
        decode.offload.streams.operation(
            "count", reads=[("maps", layer), ("list", 1), "epoch"], writes=["forecast totals"]
        )
        valid = torch.arange(len(fetch.target), device=fetch.target.device) < fetch.copies
        target = torch.where(valid, fetch.target, 0).long()
        page = fetch.source // (g.kv_heads * g.blocks_per_page)
        block = page * g.blocks_per_page + fetch.source % g.blocks_per_page
        stays = maps.slot_block.flatten()[target] == block
        used = valid & stays & (maps.slot_stamp.flatten()[target] == decode.cache.epoch)
        self.totals[layer, 0] += fetch.copies[0]
        self.totals[layer, 1] += used.sum()


def report(lookahead: Lookahead | None, misses: int, block_bytes: int) -> dict[str, Any] | None:
    """What forecasts did since start, as `/server_info` shows it; None if there are none.

    Args:
        misses: blocks that steps missed all the same.
    """
    if lookahead is None:
        return None
    prefetched, used = lookahead.totals.sum(0).tolist()
    missing = used + misses
    return {
        "forecast": lookahead.forecast.name,
        "weight_bytes": lookahead.forecast.bytes,
        "prefetched_bytes": prefetched * block_bytes,
        "used_bytes": used * block_bytes,
        "wasted_bytes": (prefetched - used) * block_bytes,
        "hidden_share": used / missing if missing else None,
    }
