"""Forecast and prefetch in decode steps of an offloaded cache: layer l's input names blocks of layer l + 1.

For each layer l, beside the forward stream: `score` as soon as the layer's input is there, which chooses blocks of
layer l + 1 that are in no slot, and `fetch` once layer l has fetched what it misses, so that copies which somebody
waits for go first. Both are over when layer l + 1 stores its keys. How many blocks a layer's forecast may fetch is
settled as the step begins, by what the steps before lacked. Nothing here waits for the device or branches on data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sparse_kernels import (
    ExpectedWorkspace,
    expected_blocks,
    prefetch_budget,
    prefetch_state,
    prefetch_totals,
    stopwatch,
    stopwatch_state,
)
from sparse_kernels.prefetch_totals import FIELDS as TOTALS
from sparse_kernels.stopwatch import START

from sglang_sparse.memory import requests_per_turn
from sglang_sparse.selection import make_estimator

from .protocol import Forecast

if TYPE_CHECKING:
    from sglang_sparse.offload.decode import OffloadedDecode

LINK = 38_000
"""Bytes a microsecond: four fifths of what `block_gather` brings over PCIe on an H200 (docs/offload.md), since scores
and the copies that somebody waits for come first."""

SCORE_BYTES = 480_000
"""What PCIe brings in the 10 us for which scores hold up the other kernels of a layer."""


class Lookahead:
    """State of forecasts of one model's decode steps.

    Args:
        decode: the steps; their summaries rank blocks, so that whatever the estimator keeps of keys is used.
        scales: of each layer's attention.
        hidden: width of the inputs.
        dtype: of the inputs.
        budget: blocks that a layer's forecast may fetch in a step at most, over requests and KV heads.
        least: blocks that a layer has to lack for its forecast to be worth its time.
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
        least: int = 1,
    ) -> None:
        self.forecast = forecast
        self._decode = decode
        self._scales = scales
        self._least, self._most = least, budget
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
        self._state = prefetch_state(decode.layers, budget, device)
        self.budgets = torch.zeros(decode.layers, dtype=torch.int32, device=device)
        """`[layers]` int32: blocks that each layer's forecast may fetch in this step."""
        self._lengths = torch.zeros((decode.layers, b.max_requests), dtype=torch.int32, device=device)
        forecastable = [layer for layer in range(decode.layers) if layer in forecast]
        self._timed = forecastable[len(forecastable) // 2] if forecastable and self.totals.is_cuda else None
        """The layer whose copies are timed: its like have as long."""
        self._clock = stopwatch_state(1, device) if self._timed is not None else None
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

    def plan(self) -> None:
        """Settles the budgets. To be called as a step begins, on the forward stream."""
        if not self._batch:
            return
        decode = self._decode
        missed = [("maps", layer) for layer in range(decode.layers)]
        decode.offload.streams.operation("budget", reads=["forecast totals", *missed], writes=["budgets"])
        prefetch_budget(
            decode.buffers.seq_lens,
            decode.cache.totals,
            self.totals,
            clock=self._clock,
            state=self._state,
            least=self._least,
            most=self._most,
            bytes_per_microsecond=LINK,
            block_bytes=decode.missed_block_bytes,
            page_size=self._geometry.page_size,
            min_context=decode.options.min_context,
            budgets=self.budgets,
            lengths=self._lengths[:, : self._batch],
        )

    def arrive(self, layer: int) -> None:
        """To be called as `layer` is about to wait for what was fetched for it."""
        if layer == self._timed and self._fetched == layer:
            assert self._clock is not None
            stopwatch(self._decode.buffers.seq_lens, self._clock, phase=0)

    def score(self, layer: int) -> None:
        """Chooses the blocks of `layer + 1` to prefetch. To be called in `layer`, whose input has been noted."""
        if self._noted != layer:
            return
        offload, following = self._decode.offload, layer + 1
        with offload.beside(following):
            reads = [("input", layer % 2), "budgets", *((name, following) for name in ("summaries", "maps", "open"))]
            offload.streams.operation("score", reads=reads, writes=["expected lists"])
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
        if following == self._timed:
            assert self._clock is not None
            stopwatch(b.seq_lens, self._clock, phase=START)
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
        # Of what can be scored before the layer has stored the step's own key. Of rows that count as padded nothing is:
        # of all, if the layer has no budget.
        page_table, seq_lens = b.page_table[turn], self._lengths[layer, turn]
        rows, min_context = turn.stop - turn.start, self._decode.options.min_context
        vectors = self.forecast.vectors(layer, self._inputs[(layer - 1) % 2, turn], (b.seq_lens[turn] - 1).long())
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
            budget=self.budgets[layer : layer + 1],
            part=(turn.start, turn.stop, self._batch),
            page_size=g.page_size,
            block_size=g.block_size,
            min_context=min_context,
            workspace=self._expected,
            block_lists=self._lists[turn],
            block_counts=self._counts[turn],
        )

    def _count(self, layer: int) -> None:
        """Adds up what was prefetched for `layer`, once its misses have been fetched."""
        if self._fetched != layer:
            return
        self._fetched = None
        decode = self._decode
        decode.offload.streams.operation(
            "count", reads=[("maps", layer), ("list", 1), "epoch"], writes=["forecast totals"]
        )
        prefetch_totals(
            decode.cache.expected,
            decode.cache.maps[layer],
            decode.cache.epoch,
            blocks_per_page=self._geometry.blocks_per_page,
            totals=self.totals[layer],
        )


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
