"""Sparse decode in SGLang's `/metrics`. Names, labels and meanings are stable; docs/metrics.md describes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sparse_kernels.slot_maps import TOTALS

from sglang_sparse import sglang_compat
from sglang_sparse.backend import SparseDecodeBackend
from sglang_sparse.observe.counters import CounterWindow, Reading
from sglang_sparse.observe.coverage_history import BUCKETS
from sglang_sparse.observe.layer_clock import PHASES
from sglang_sparse.observe.layer_groups import LAYER_GROUPS, by_layer_group, layer_group

logger = logging.getLogger(__name__)

EXPORT_SECONDS = 1.0
"""How often counters are read while requests decode, and how many seconds one observation of a share covers."""

SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Upper bounds of the share histograms' buckets, inclusive. Scanning and then keeping everything reads more than 1."""

FORECAST_KINDS = ("used", "wasted")

STEP_KINDS = ("sparse", "dense")


class Metrics:
    """The series of one scheduler, that is of one tensor-parallel rank and its heads. Made when the scheduler's metrics
    collector exists, whose label `tp_rank` tells the ranks apart.

    Args:
        backend: whose counters, audit and clock are exported.
        reporter: SGLang's SchedulerMetricsReporter, which exports metrics.
    """

    def __init__(self, backend: SparseDecodeBackend, reporter: Any) -> None:
        def series(kind: str, name: str, text: str, *labels: str, **more: Any) -> sglang_compat.Series:
            return sglang_compat.Series(reporter, kind, f"sglang_sparse_{name}", text, labels, **more)

        step = backend.step
        self._step = step
        self._audit = backend.audit
        self._counts = step.counters.window()
        self._groups = sorted({layer_group(n, step.layers) for n in range(step.layers)}, key=LAYER_GROUPS.index)

        # All ranks run the same steps: sums over them count a step once.
        self._counts_steps = sglang_compat.is_first_rank(reporter)
        self._steps = series("counter", "steps", "Decode steps; sparse if a request was long enough to scan.", "kind")
        by_group = ("layer_group",)
        self._kv = series("counter", "kv_bytes", "KV bytes that dense decode would have read.", *by_group)
        self._kept = series("counter", "kept_bytes", "KV bytes of the blocks that were read.", *by_group)
        self._scan = series("counter", "scan_bytes", "Bytes that were read to choose blocks.", *by_group)
        self._kept_share = series(
            "histogram",
            "kept_fraction",
            "Blocks read / all blocks, over a second of decoding.",
            *by_group,
            buckets=SHARES,
        )
        self._read_share = series(
            "histogram",
            "bytes_read_fraction",
            "(Scanned bytes + KV bytes read) / all KV bytes, over a second of decoding.",
            *by_group,
            buckets=SHARES,
        )
        for kind in STEP_KINDS if self._counts_steps else ():
            self._steps.touch(kind=kind)
        for group in self._groups:
            for metric in (self._kv, self._kept, self._scan, self._kept_share, self._read_share):
                metric.touch(layer_group=group)

        series("gauge", "summary_bytes", "Memory of the page summaries.").record(step.summaries.bytes)
        series("gauge", "step_buffer_bytes", "Memory of the static step buffers.").record(step.buffers.bytes)
        self._gamma = None
        if step.rule.name == "coverage" and step.sparse_layers:
            self._gamma = series("gauge", "gamma", "The coverage asked for, mean over the sparse layers.")

        self._clock: CounterWindow[list[int]] | None = None
        if step.clock is not None:
            self._clock = CounterWindow(step.clock.state, lambda state: state.tolist())
            self._phases = series(
                "counter", "timed_layer_seconds", "Time of one layer of each decode step, by phase.", "phase"
            )
            self._timings = series("counter", "timed_layers", "Layers timed: one in each decode step.")
            self._timings.touch()
            for phase in PHASES:
                self._phases.touch(phase=phase)

        self._offload: CounterWindow[list[int]] | None = None
        if step.offload_totals is not None:
            self._offload = CounterWindow(step.offload_totals, lambda totals: totals.sum(0).tolist())
            self._block_bytes = step.missed_block_bytes
            self._looked_up = series(
                "counter", "offload_blocks", "Blocks that steps looked up in slots, by what became of them.", "kind"
            )
            self._missed = series("counter", "offload_missed_bytes", "Bytes that steps read from host memory.")
            self._missed.touch()
            for kind in TOTALS:
                self._looked_up.touch(kind=kind)

        self._forecast: CounterWindow[list[int]] | None = None
        if step.forecast_totals is not None:
            self._forecast = CounterWindow(step.forecast_totals, lambda totals: totals.sum(0).tolist())
            self._prefetched = series(
                "counter", "forecast_bytes", "Bytes that were prefetched, by what became of them.", "kind"
            )
            for kind in FORECAST_KINDS:
                self._prefetched.touch(kind=kind)
            self._hidden = series(
                "gauge",
                "forecast_hidden_fraction",
                "Missed bytes that had been prefetched / all, over the last second of decoding.",
            )

        if self._audit is not None:
            self._coverage = series(
                "histogram",
                "coverage",
                "True share of the attention mass in the blocks that were chosen, a value for each KV head of an "
                "audited step: the mean of its query heads, or with group every their minimum.",
                "layer",
                buckets=BUCKETS,
            )
            for layer in step.sparse_layers:
                self._coverage.touch(layer=layer)

    def export_audit(self, wait: bool) -> None:
        """Adds the audit's samples since the last call; with `wait`, those that are on their way, too."""
        if self._audit is None:
            return
        if wait:
            self._audit.settle()
        for layer, coverage in self._audit.take_unread():
            for value in coverage:
                self._coverage.record(value, layer=layer)

    def export_counters(self, wait: bool) -> None:
        """Adds what the device counted since the last call; without `wait`, what an earlier call asked it for."""
        self._add(self._counts.read_all() if wait else self._counts.read())
        if self._gamma is not None:
            layers = self._step.sparse_layers
            self._gamma.record(sum(map(self._step.control.gamma_of, layers)) / len(layers))
        if self._clock is not None:
            _, timings, *nanoseconds = self._clock.read_all() if wait else self._clock.read()
            self._timings.record(timings)
            for phase, duration in zip(PHASES, nanoseconds, strict=True):
                # The phase `rest` of a step that runs just now may lack its start.
                self._phases.record(max(0, duration) / 1e9, phase=phase)

        if self._offload is not None:
            counts = dict(zip(TOTALS, self._offload.read_all() if wait else self._offload.read(), strict=True))
            for kind, count in counts.items():
                self._looked_up.record(count, kind=kind)
            self._missed.record(counts["misses"] * self._block_bytes)
            if self._forecast is not None:
                self._add_forecast(counts["misses"], self._forecast.read_all() if wait else self._forecast.read())

    def _add_forecast(self, misses: int, counts: list[int]) -> None:
        prefetched, used = counts
        # The two counters are read one after the other: a step may come between them.
        for kind, blocks in zip(FORECAST_KINDS, (used, max(0, prefetched - used)), strict=True):
            self._prefetched.record(blocks * self._block_bytes, kind=kind)
        if used + misses:
            self._hidden.record(used / (used + misses))

    def _add(self, reading: Reading) -> None:
        if self._counts_steps:
            self._steps.record(reading.scanned_steps, kind="sparse")
            self._steps.record(reading.steps - reading.scanned_steps, kind="dense")
        for name, group in by_layer_group(reading).items():
            self._kv.record(group.kv_bytes, layer_group=name)
            self._kept.record(group.kept_bytes, layer_group=name)
            self._scan.record(group.scan_bytes, layer_group=name)
            self._kept_share.record(group.kept_fraction, layer_group=name)
            self._read_share.record(group.bytes_read_fraction, layer_group=name)


class MetricsExporter:
    """Exports after decode steps and when the server falls idle. Its failures do not end the scheduler.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, backend: SparseDecodeBackend, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._now = clock
        self._metrics: Metrics | None = None
        self._is_off = False
        self._exported = float("-inf")
        self._is_current = False

    def after_step(self, reporter: Any) -> None:
        """To be called after each decode step; `reporter` is SGLang's SchedulerMetricsReporter."""
        self._is_current = False
        now = self._now()
        is_due = now >= self._exported + EXPORT_SECONDS
        if is_due:
            self._exported = now
        self._export(reporter, counters=is_due, wait=False)

    def when_idle(self, reporter: Any) -> None:
        """To be called whenever there is nothing to do; exports once after the last step."""
        if not self._is_current:
            self._is_current = True
            self._export(reporter, counters=True, wait=True)

    def _export(self, reporter: Any, *, counters: bool, wait: bool) -> None:
        if self._is_off or not sglang_compat.can_export_metrics(reporter):
            return
        try:
            if self._metrics is None:
                self._metrics = Metrics(self._backend, reporter)
            self._metrics.export_audit(wait)
            if counters:
                self._metrics.export_counters(wait)
        except Exception:
            logger.exception("the metrics of sparse decode failed and are off from here on")
            self._is_off = True
