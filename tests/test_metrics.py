"""Audited coverage in `/metrics`: labels, buckets, and a failure that must not end the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram

from sglang_sparse.observe.coverage_history import CoverageHistory
from sglang_sparse.observe.metrics import NAME, CoverageMetric


def reporter(enabled: bool, histogram: Any) -> Any:
    """Stands in for SGLang's SchedulerMetricsReporter."""
    collector = SimpleNamespace(labels={"model_name": "tiny", "tp_rank": 0}, _histogram_cls=histogram)
    return SimpleNamespace(current_scheduler_metrics_enabled=enabled, metrics_collector=collector)


def audit() -> Any:
    history = CoverageHistory(None)
    history.add(3, [0.93, 0.55])
    return history


def test_samples_become_observations_with_sglangs_labels() -> None:
    registry = CollectorRegistry()
    metric, found = CoverageMetric(), audit()
    exporting = reporter(True, lambda **arguments: Histogram(registry=registry, **arguments))
    metric.export(found, exporting)
    found.add(3, [0.93, 0.6])
    metric.export(found, exporting)
    labels = {"model_name": "tiny", "tp_rank": "0", "layer": "3"}
    assert registry.get_sample_value(f"{NAME}_count", labels) == 4
    assert registry.get_sample_value(f"{NAME}_bucket", {**labels, "le": "0.6"}) == 2
    assert registry.get_sample_value(f"{NAME}_bucket", {**labels, "le": "0.94"}) == 4


def test_without_metrics_samples_are_let_go() -> None:
    found = audit()
    CoverageMetric().export(found, reporter(False, None))
    assert found.take_unread() == []


def test_a_failure_is_logged_once_and_does_not_pass(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(**arguments: Any) -> None:
        raise ValueError("Duplicated timeseries")

    metric, found = CoverageMetric(), audit()
    for _ in range(2):
        metric.export(found, reporter(True, refuse))
        found.add(0, [0.5])
    assert len(caplog.messages) == 1
    assert NAME in caplog.messages[0]
