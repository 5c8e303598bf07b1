"""Sparse decode in `/metrics`: values, labels, when counters are read, and a failure that must not end the server."""

from __future__ import annotations

import dataclasses
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from sparse_kernels.slot_maps import TOTALS

from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.observe.coverage_history import CoverageHistory
from sglang_sparse.observe.metrics import MetricsExporter
from sglang_sparse.options import SparseDecodeOptions

sys.path.insert(0, str(Path(__file__).parent / "docker"))

import monitoring

GEOMETRY = Geometry(kv_heads=2, group_size=1, head_dim=64, dtype=torch.float32, page_size=32, block_size=16)
LABELS = {"model_name": "tiny", "tp_rank": "0"}
LAYERS = 3


class Audit(CoverageHistory):
    """What arrived, and samples that the device has not finished."""

    def __init__(self) -> None:
        super().__init__(None)
        self.on_their_way: list[tuple[int, list[float]]] = []

    def settle(self) -> None:
        while self.on_their_way:
            self.add(*self.on_their_way.pop(0))


class Exported:
    """A decode step of three layers, the first dense, with an exporter, a clock to turn by hand, and a registry."""

    def __init__(self, **options: Any) -> None:
        made = SparseDecodeOptions(min_context=100, dense_layers=(0,), gamma=0.9, **options)
        self.step = DecodeStep(
            made, GEOMETRY, layers=LAYERS, pages=9, max_requests=4, max_pages=8, device="cpu", timed=True
        )
        self.audit = Audit()
        self.now = 0.0
        self.registry = CollectorRegistry()
        backend: Any = SimpleNamespace(step=self.step, audit=self.audit)
        self.exporter = MetricsExporter(backend, clock=lambda: self.now)
        collector = SimpleNamespace(
            labels=LABELS,
            _counter_cls=partial(Counter, registry=self.registry),
            _gauge_cls=partial(Gauge, registry=self.registry),
            _histogram_cls=partial(Histogram, registry=self.registry),
        )
        self.reporter: Any = SimpleNamespace(
            current_scheduler_metrics_enabled=True, is_stats_logging_rank=True, metrics_collector=collector
        )

    def count(self, lengths: list[int], kept: list[list[int]]) -> None:
        """A step that kept so many blocks in each layer and KV head, and reports itself."""
        self.step.counters.count_step(torch.tensor(lengths, dtype=torch.int32))
        self.step.counters.kept_blocks += torch.tensor(kept)
        self.exporter.after_step(self.reporter)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"sglang_sparse_{name}", LABELS | labels)


def test_counters_are_read_once_a_second_and_when_idle() -> None:
    made = Exported()
    # 160 tokens are 10 blocks in 5 closed pages; 32 are below the minimum context.
    made.count([160, 32], [[0, 0], [7, 3], [12, 12]])
    assert made.value("steps_total", kind="sparse") == 0, "the first call asks for counters, and reads none yet"
    made.count([32], [[0, 0], [2, 2], [2, 2]])
    made.now = 1.0
    made.count([160], [[0, 0], [5, 5], [10, 10]])
    assert made.value("steps_total", kind="sparse") == 1
    assert made.value("steps_total", kind="dense") == 0
    token = GEOMETRY.kv_bytes
    assert made.value("kv_bytes_total", layer_group="middle") == 192 * 2 * token
    assert made.value("kept_bytes_total", layer_group="middle") == pytest.approx(192 * 2 * token * 10 / 24)
    assert made.value("kept_bytes_total", layer_group="first") == 192 * 2 * token, "a dense layer reads everything"
    assert made.value("scan_bytes_total", layer_group="first") == 0
    scan = 160 * 2 * made.step.estimator.scan_bytes() + 160 * 2 * made.step.tail.summary_bytes()
    assert made.value("scan_bytes_total", layer_group="last") == pytest.approx(scan)
    assert made.value("kept_fraction_sum", layer_group="middle") == pytest.approx(10 / 24)
    read = 10 / 24 + scan / (192 * 2 * token)
    assert made.value("bytes_read_fraction_sum", layer_group="middle") == pytest.approx(read)

    made.exporter.when_idle(made.reporter)
    assert made.value("steps_total", kind="sparse") == 2
    assert made.value("steps_total", kind="dense") == 1
    assert made.value("kept_fraction_count", layer_group="last") == 2
    made.exporter.when_idle(made.reporter)
    assert made.value("steps_total", kind="sparse") == 2
    # A copy that was asked for before the server fell idle must not be counted again.
    made.now = 2.0
    made.count([160], [[0, 0], [5, 5], [10, 10]])
    made.exporter.when_idle(made.reporter)
    assert made.value("steps_total", kind="sparse") == 3


def test_gauges_and_timed_layer() -> None:
    made = Exported()
    made.exporter.when_idle(made.reporter)
    assert made.value("gamma") == pytest.approx(0.9)
    assert made.value("summary_bytes") == made.step.summaries.bytes > 0
    assert made.value("step_buffer_bytes") == made.step.buffers.bytes > 0
    for phase in ("estimate", "rule", "attention", "rest"):
        assert made.value("timed_layer_seconds_total", phase=phase) == 0
    made.step.clock.state += torch.tensor([99, 2, 1_000, 2_000, 3_000, 4_000])
    made.exporter.after_step(made.reporter)
    made.exporter.when_idle(made.reporter)
    assert made.value("timed_layers_total") == 2
    assert made.value("timed_layer_seconds_total", phase="rule") == pytest.approx(2e-6)


def test_without_a_coverage_to_aim_at_there_is_no_gamma() -> None:
    made = Exported()
    made.step.rule = SimpleNamespace(name="top-k")
    made.exporter.when_idle(made.reporter)
    assert made.value("gamma") is None
    assert made.value("steps_total", kind="dense") == 0


def test_audit_samples_become_observations_at_once() -> None:
    made = Exported()
    made.audit.add(2, [0.93, 0.55])
    made.exporter.after_step(made.reporter)
    made.audit.add(2, [0.93, 0.6])
    made.exporter.after_step(made.reporter)
    assert made.value("coverage_count", layer="2") == 4
    assert made.value("coverage_bucket", layer="2", le="0.6") == 2
    assert made.value("coverage_bucket", layer="2", le="0.94") == 4
    assert made.value("coverage_count", layer="1") == 0, "a sparse layer without samples is there, at zero"
    assert made.value("coverage_count", layer="0") is None, "a dense layer is not audited"


def test_audit_samples_on_their_way_are_waited_for_when_idle_and_never_between_steps() -> None:
    made = Exported()
    made.audit.on_their_way.append((2, [0.93, 0.55]))
    made.exporter.after_step(made.reporter)
    assert made.value("coverage_count", layer="2") == 0
    made.exporter.when_idle(made.reporter)
    assert made.value("coverage_count", layer="2") == 2


def test_nothing_is_made_while_metrics_are_off() -> None:
    made = Exported()
    made.reporter.current_scheduler_metrics_enabled = False
    made.count([160], [[1, 1]] * LAYERS)
    made.exporter.when_idle(made.reporter)
    assert not list(made.registry.collect())


def test_another_rank_exports_its_heads_and_no_steps() -> None:
    """SGLang exports the first rank's metrics alone; steps are those of all ranks, so that sums count them once."""
    made = Exported()
    made.reporter.current_scheduler_metrics_enabled = False
    made.reporter.is_stats_logging_rank = False
    made.reporter.enable_metrics = True
    made.count([160], [[0, 0], [5, 5], [10, 10]])
    made.exporter.when_idle(made.reporter)
    assert made.value("kept_bytes_total", layer_group="middle") == 160 * GEOMETRY.kv_bytes
    assert made.value("steps_total", kind="sparse") is None


def test_a_failure_is_logged_once_and_does_not_pass(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(**arguments: Any) -> None:
        raise ValueError("Duplicated timeseries")

    made = Exported()
    made.reporter.metrics_collector._counter_cls = refuse
    for _ in range(2):
        made.exporter.after_step(made.reporter)
        made.exporter.when_idle(made.reporter)
    assert len(caplog.messages) == 1
    assert "metrics of sparse decode failed" in caplog.messages[0]


def test_a_step_is_timed_in_a_layer_that_has_one_after_it() -> None:
    made = Exported()
    assert made.step.clock is not None
    assert made.step.clock.layer == 1
    alone = dataclasses.replace(made.step.options, dense_layers=(0, 1))
    step = DecodeStep(alone, GEOMETRY, layers=LAYERS, pages=9, max_requests=4, max_pages=8, device="cpu", timed=True)
    assert step.clock is None, "the last layer has no layer after it"


def test_hits_and_misses_of_offload() -> None:
    made = Exported()
    assert made.value("offload_blocks_total", kind="hits") is None
    totals = torch.zeros((LAYERS, 4), dtype=torch.int64)
    made = Exported()
    step: Any = SimpleNamespace(
        **{name: getattr(made.step, name) for name in vars(made.step)},
        offload_totals=totals,
        forecast_totals=None,
        missed_block_bytes=100,
    )
    made.exporter._backend = SimpleNamespace(step=step, audit=made.audit)  # type: ignore[assignment]
    made.count([160], [[0, 0], [7, 3], [5, 5]])
    assert made.value("offload_blocks_total", kind="misses") == 0
    totals += torch.tensor([30, 5, 2, 1])
    made.exporter.when_idle(made.reporter)
    assert [made.value("offload_blocks_total", kind=kind) for kind in ("hits", "misses", "direct", "evictions")] == [
        90,
        15,
        6,
        3,
    ]
    assert made.value("offload_missed_bytes_total") == 15 * 100
    assert made.value("forecast_bytes_total", kind="used") is None


def test_what_forecasts_hide() -> None:
    made = Exported()
    totals = {name: torch.zeros((LAYERS, n), dtype=torch.int64) for name, n in (("offload", 4), ("forecast", 2))}
    own = {name: getattr(made.step, name) for name in vars(made.step)}
    step: Any = SimpleNamespace(
        **own, offload_totals=totals["offload"], forecast_totals=totals["forecast"], missed_block_bytes=100
    )
    made.exporter._backend = SimpleNamespace(step=step, audit=made.audit)  # type: ignore[assignment]
    made.count([160], [[0, 0], [7, 3], [5, 5]])
    assert made.value("forecast_bytes_total", kind="wasted") == 0
    totals["offload"] += torch.tensor([30, 5, 2, 1])
    totals["forecast"] += torch.tensor([25, 15])
    made.exporter.when_idle(made.reporter)
    assert made.value("forecast_bytes_total", kind="used") == 45 * 100
    assert made.value("forecast_bytes_total", kind="wasted") == 30 * 100
    assert made.value("forecast_hidden_fraction") == 0.75


def test_what_board_and_alerts_ask_of_offload_is_exported() -> None:
    """A server without offload, of which `tests/server/test_metrics_endpoint.py` asks the others, has none of it."""
    made = Exported()
    totals = torch.zeros((LAYERS, 4), dtype=torch.int64)
    step: Any = SimpleNamespace(
        **{name: getattr(made.step, name) for name in vars(made.step)},
        offload_totals=totals,
        missed_block_bytes=100,
        forecast_totals=None,
    )
    made.exporter._backend = SimpleNamespace(step=step, audit=made.audit)  # type: ignore[assignment]
    made.exporter.when_idle(made.reporter)
    exported = {sample.name for family in made.registry.collect() for sample in family.samples}
    asked = {name for name in monitoring.queried_names() if name.startswith("sglang_sparse_offload_")}
    assert asked == {"sglang_sparse_offload_blocks_total", "sglang_sparse_offload_missed_bytes_total"}
    assert asked <= exported
    kinds = set(re.findall(r'kind=~?"([a-z|]+)"', monitoring.ALERTS.read_text()))
    assert {kind for each in kinds for kind in each.split("|")} - {"sparse", "dense"} <= set(TOTALS)
