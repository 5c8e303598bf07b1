"""One decode step without SGLang: update summaries, choose blocks, attend to them and to the tail.

The backend feeds it from SGLang's pools. Nothing here allocates, waits for the device or branches on data, so that a
step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sparse_kernels import AttentionTail, SelectionTap, TapPoint, prepare_clusters, request_totals, sparse_attention

from sglang_sparse.buffers import DecodeBuffers
from sglang_sparse.control.state import DecodeControl
from sglang_sparse.forecast.chooser import ForecastChooser
from sglang_sparse.fused import FusedPass
from sglang_sparse.geometry import Geometry
from sglang_sparse.observe.counters import DecodeCounters
from sglang_sparse.observe.layer_clock import ATTENTION, ESTIMATE, RULE, LayerClock, layer_to_time
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.paths import Paths
from sglang_sparse.selection import Maxima, PseudoMaximum, make_estimator, make_rule
from sglang_sparse.selection_options import FORECAST
from sglang_sparse.split.sizes import read_bytes as split_read_bytes
from sglang_sparse.summaries import PageSummaries
from sglang_sparse.tail import make_tail


class DecodeStep:
    """State and orchestration of decode steps for one model.

    Args:
        layers: attention layers of the model.
        pages: physical pages of the KV pool, the padding page included.
        max_requests: largest batch.
        max_pages: pages of the longest request.
        timed: whether the phases of one layer are timed, which costs five small launches a step.
        windows: layers with a sliding window, in which the step has no part: they are passed by (`skip`), and what is
            counted is of the other layers.
    """

    def __init__(
        self,
        options: SparseDecodeOptions,
        geometry: Geometry,
        *,
        layers: int,
        pages: int,
        max_requests: int,
        max_pages: int,
        device: torch.device | str,
        timed: bool = False,
        windows: frozenset[int] = frozenset(),
    ) -> None:
        self.options = options
        self.geometry = geometry
        self.layers = layers
        self.estimator = make_estimator(options, geometry)
        self.rule = make_rule(options, geometry)
        self.tail = make_tail(options, geometry)
        self.windows = windows
        dense = windows | (set(options.dense_layers) if self.rule.needs_mass else set(range(layers)))
        self.sparse_layers = [layer for layer in range(layers) if layer not in dense]
        # The keys of a split cache are summaries: all layers have them.
        summarised = list(range(layers)) if options.kv_format == "split" else self.sparse_layers
        self.summaries = PageSummaries(self.estimator, summarised, pages, device, self.tail)
        self.paths = Paths.of(options, geometry, device)
        fused_requests = self.paths.most_fused(max_requests) if self.sparse_layers else 0
        self.buffers = DecodeBuffers(
            geometry,
            max_requests=max_requests,
            max_pages=max_pages,
            thresholds=[self.rule.thresholds(layer) for layer in range(layers)],
            selects=bool(self.sparse_layers),
            has_tail=self.tail is not None,
            lists=self.paths.ever_lists,
            has_maxima=self.rule.needs_maxima,
            fused_requests=fused_requests,
            device=device,
        )
        if self.sparse_layers:
            # Before a step is captured, while the device may be waited for.
            prepare_clusters(device)
        self._pseudo_maximum = PseudoMaximum(options, geometry)
        self.fused = FusedPass(options, geometry, fused_requests, device) if fused_requests else None
        self.tap: SelectionTap | None = None
        if options.audit_rate > 0 and self.sparse_layers:
            self.tap = SelectionTap.create(
                kv_heads=geometry.kv_heads,
                group_size=geometry.group_size,
                head_dim=geometry.head_dim,
                capacity=max_pages * geometry.blocks_per_page,
                dtype=geometry.dtype,
                device=device,
            )
        self.counters = DecodeCounters(
            geometry,
            layers=layers,
            sparse_layers=self.sparse_layers,
            windows=windows,
            scan_bytes=self.estimator.scan_bytes() + (self.tail.summary_bytes() if self.tail else 0),
            min_context=options.min_context,
            device=device,
            read_bytes=split_read_bytes(geometry) if options.kv_format == "split" else geometry.kv_bytes,
        )
        self.control = DecodeControl(
            options,
            self.buffers.thresholds,
            on_change=self.counters.mark,
            first_kv_head=geometry.first_kv_head,
        )
        layer = layer_to_time(self.sparse_layers, layers) if timed else None
        self.clock = LayerClock(layer, self.buffers.seq_lens) if layer is not None else None
        self.chooser: ForecastChooser | None = None
        """What ranks blocks in place of queries; to be set if the options ask for it."""
        self.dense = False
        """Whether this step reads all blocks of all layers, because no request of it may leave any out. A captured step
        is what it was as it was captured."""

    @contextmanager
    def of_kind(self, dense: bool) -> Iterator[None]:
        """While it lasts, steps are dense, or are not."""
        before, self.dense = self.dense, dense
        try:
            yield
        finally:
            self.dense = before

    @property
    def offload_totals(self) -> torch.Tensor | None:
        """`[layers, 4]` int64, see `sparse_kernels.slot_maps.TOTALS`; None if the KV cache is on the GPU."""
        return None

    @property
    def forecast_totals(self) -> torch.Tensor | None:
        """`[layers, 2]` int64, see `forecast.lookahead.TOTALS`; None if nothing is prefetched."""
        return None

    @property
    def missed_block_bytes(self) -> int:
        """Bytes that a block which offload misses has in host memory."""
        return self.geometry.block_size * self.geometry.kv_bytes

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attention of one layer for the step that `buffers.load` announced.

        Args:
            q: `[B, Hq, D]`.
            k_pool, v_pool: `[slots, Hkv, D]`; the new token of each request is already there.
            out: `[B, Hq, D]`, written; zeros for padded rows.
        """
        batch = q.shape[0]
        if self.clock:
            self.clock.enter(layer)
        if layer in self.summaries:
            self.summaries.update(layer, k_pool, v_pool, self.buffers.closing_pages[:batch])
        if not self.dense and self.fused and layer in self.summaries and self.paths.takes_fused(batch):
            self._attend_fused(layer, q, k_pool, v_pool, scale, out)
        else:
            for turn in self._turns(batch):
                self._attend_turn(layer, q[turn], k_pool, v_pool, turn, scale, out[turn])
        self._count_requests(layer, batch)

    def skip(self, layer: int, batch: int) -> None:
        """Instead of `attend`, in a layer with a sliding window."""
        if self.clock:
            self.clock.enter(layer)
        self._count_requests(layer, batch)

    def _turns(self, batch: int) -> Iterator[slice]:
        """The requests that are served at once: all in a dense step, which has no need of the selection buffers."""
        if self.dense:
            yield slice(0, batch)
            return
        for start in range(0, batch, self.buffers.turn):
            yield slice(start, min(start + self.buffers.turn, batch))

    def _count_requests(self, layer: int, batch: int) -> None:
        """After the last layer: what each request of the step read."""
        if layer == self.layers - 1:
            layers, counts = self.layers - len(self.windows), self.buffers.block_counts
            request_totals(
                counts[:0] if self.dense else counts,
                self.buffers.seq_lens[:batch],
                layers=layers,
                dense_layers=layers if self.dense else layers - len(self.sparse_layers),
                block_size=self.geometry.block_size,
                out=self.buffers.request_totals,
            )

    def _attend_fused(
        self, layer: int, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        """`attend` by the fused pass, for all requests at once: no buffers of its own are as long as they are."""
        assert self.fused is not None
        b, batch = self.buffers, q.shape[0]
        self.fused.attend(
            q,
            k_pool,
            v_pool,
            self.summaries[layer],
            b.page_table[:batch],
            b.seq_lens[:batch],
            thresholds=b.thresholds[layer, :batch],
            scale=scale,
            out=out,
            block_counts=b.block_counts[layer, :batch],
            kept_total=self.counters.kept_blocks[layer],
            last_kept=b.last_kept[layer],
            value_means=self.summaries.value_means(layer) if self.tail else None,
            tap=TapPoint(self.tap, layer, q) if self.tap is not None else None,
        )
        if self.clock:
            self.clock.end(layer, ATTENTION)

    def _attend_turn(
        self,
        layer: int,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        turn: slice,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """`attend` for the requests of one turn, which share the selection buffers with those of the next."""
        b, g = self.buffers, self.geometry
        page_table, seq_lens = b.page_table[turn], b.seq_lens[turn]
        block_lists, block_counts, tail = self._select(layer, q, k_pool, turn, scale)
        sparse_attention(
            q,
            k_pool,
            v_pool,
            page_table,
            seq_lens,
            block_lists,
            block_counts,
            scale=scale,
            page_size=g.page_size,
            block_size=g.block_size,
            out=out,
            workspace=b.attention,
            tail=tail,
        )
        if self.clock:
            self.clock.end(layer, ATTENTION)

    def _select(
        self,
        layer: int,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        turn: slice,
        scale: float,
        page_table: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, AttentionTail | None]:
        """Lists, counts and tail of a turn's requests; all None where everything is read.

        `page_table` is the turn's, if `k_pool` has other pages than the step's table says.
        """
        if self.dense or layer not in self.sparse_layers:
            return None, None, None
        b = self.buffers
        page_table, seq_lens = b.page_table[turn] if page_table is None else page_table, b.seq_lens[turn]
        rows = slice(0, q.shape[0])
        block_lists, block_counts = b.block_lists[rows], b.block_counts[layer, turn]
        maxima = b.maxima.rows(rows) if b.maxima else None
        self.estimator.block_mass(
            self._ranking(layer, q, turn),
            k_pool,
            self.summaries[layer],
            page_table,
            seq_lens,
            scale=scale,
            min_context=self.options.min_context,
            out=b.log_mass[rows],
            block_max=maxima.blocks if maxima else None,
        )
        if maxima:
            self._write_pseudo_maximum(layer, q, k_pool, page_table, turn, scale, maxima)
        if self.clock:
            self.clock.end(layer, ESTIMATE)
        self.rule.select(
            b.log_mass[rows],
            seq_lens,
            thresholds=b.thresholds[layer, turn],
            block_lists=block_lists,
            block_counts=block_counts,
            scratch=b.scratch[rows],
            kept_total=self.counters.kept_blocks[layer],
            kept_mask=b.kept_mask[rows] if self.tail else None,
            tap=TapPoint(self.tap, layer, q, first_row=turn.start) if self.tap is not None else None,
            maxima=maxima,
        )
        if self.clock:
            self.clock.end(layer, RULE)
        if self.tail is None:
            return block_lists, block_counts, None
        tail = AttentionTail(b.log_mass[rows], b.kept_mask[rows], self.summaries.value_means(layer))
        return block_lists, block_counts, tail

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
        """Writes each head's largest score over the keys of the forced blocks."""
        self._pseudo_maximum.write(
            q,
            k_pool,
            page_table,
            self.buffers.seq_lens[turn],
            scale=scale,
            min_context=self.options.min_context,
            maxima=maxima,
        )

    def _ranking(self, layer: int, q: torch.Tensor, turn: slice) -> torch.Tensor:
        """What blocks are ranked by: `q`, or a forecast of it. What attends is `q` in any case."""
        if self.options.select_by != FORECAST:
            return q
        if self.chooser is None:
            raise RuntimeError("a forecast is to choose blocks, and there is none")
        return self.chooser.vectors(layer, q, self.buffers.seq_lens[turn], turn)
