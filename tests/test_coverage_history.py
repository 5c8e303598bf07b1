"""Histograms of audited coverage, and the warning when it stays low."""

from __future__ import annotations

import json

import pytest

from sglang_sparse.observe.coverage_history import BUCKETS, MARGIN, WINDOW, CoverageHistory
from sglang_sparse.options import SparseDecodeOptions


def test_nothing_was_found_before_the_first_sample() -> None:
    assert CoverageHistory(lambda layer: 0.95).report() == {
        "samples": 0,
        "mean_coverage": None,
        "worst_layer": None,
        "by_layer": {},
    }


def test_values_land_in_the_bucket_of_their_upper_bound() -> None:
    history = CoverageHistory(lambda layer: 0.95)
    history.add(4, [0.1, 0.95, 0.9500001, 1.0000002])
    history.add(1, [0.5])
    report = json.loads(json.dumps(history.report()))
    assert report["samples"] == 2
    assert report["mean_coverage"] == pytest.approx((0.1 + 0.95 + 0.95 + 1 + 0.5) / 5, abs=1e-6)
    assert report["worst_layer"] == 1
    assert list(report["by_layer"]) == ["1", "4"]
    layer = report["by_layer"]["4"]
    assert layer["count"] == 4
    assert layer["mean"] == pytest.approx(0.75, abs=1e-6)
    assert {bound: n for bound, n in layer["histogram"].items() if n} == {"0.5": 1, "0.95": 1, "0.96": 1, "1.0": 1}
    assert list(layer["histogram"]) == [str(bound) for bound in BUCKETS]


def test_samples_that_are_not_finite_are_dropped() -> None:
    history = CoverageHistory(lambda layer: 0.95)
    history.add(0, [0.9, float("nan")])
    assert history.report()["samples"] == 0
    assert history.take_unread() == []


def test_samples_are_handed_out_once() -> None:
    history = CoverageHistory(None)
    history.add(3, [0.9, 1.00001])
    history.add(0, [0.5, 0.25])
    assert history.take_unread() == [(3, [0.9, 1.0]), (0, [0.5, 0.25])]
    assert history.take_unread() == []


def fill(history: CoverageHistory, value: float, samples: int = WINDOW, layer: int = 0) -> None:
    for _ in range(samples):
        history.add(layer, [value, value])


def test_low_coverage_is_told_once_a_crossing(caplog: pytest.LogCaptureFixture) -> None:
    history = CoverageHistory(lambda layer: 0.9)
    for layer, value in ((5, 0.7), (2, 0.8), (7, 0.6), (1, 0.89)):
        fill(history, value, WINDOW // 4, layer)
    assert len(caplog.messages) == 1
    line = caplog.messages[0]
    for part in (
        f"over the last {WINDOW} audited samples, the blocks read cover {0.9 - (0.7 + 0.8 + 0.6 + 0.89) / 4:.3f} less",
        "--sparse-decode-gamma",
        "--sparse-decode-thumbnail-bits",
        "--sparse-decode-dense-layers: 2,5,7 (short by 0.300 in layer 7, 0.200 in layer 5, 0.100 in layer 2)",
    ):
        assert part in line
    assert "\n" not in line
    fill(history, 0.6)
    assert len(caplog.messages) == 1
    fill(history, 0.95)
    fill(history, 0.6)
    assert len(caplog.messages) == 2


def test_a_window_that_is_not_full_or_within_the_margin_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    history = CoverageHistory(lambda layer: 0.9)
    fill(history, 0.1, WINDOW - 1)
    history = CoverageHistory(lambda layer: 0.9)
    fill(history, 0.9 - MARGIN + 1e-6)
    assert caplog.messages == []


def test_each_layer_has_its_own_gamma(caplog: pytest.LogCaptureFixture) -> None:
    history = CoverageHistory([0.5, 0.9].__getitem__)
    fill(history, 0.6, layer=0)
    assert caplog.messages == []
    assert history.report()["worst_layer"] == 0
    fill(history, 0.7, layer=1)
    assert len(caplog.messages) == 1
    assert history.report()["worst_layer"] == 1


def test_the_warning_names_the_option_that_asks(caplog: pytest.LogCaptureFixture) -> None:
    options = SparseDecodeOptions(gamma_by_head=((0.5, 0.9), (0.9, 0.9)))
    history = CoverageHistory(options.gamma_of, options.gamma_name)
    # Heads of one layer are weighed together: what one reads more than it was asked to makes up for another.
    fill(history, 0.7, layer=0)
    assert caplog.messages == []
    fill(history, 0.6, layer=1)
    assert len(caplog.messages) == 1
    assert "attention mass than config key 'gamma_by_head' asks for (means over KV heads" in caplog.messages[0]
    assert "(short by 0.300 in layer 1, 0.000 in layer 0)" in caplog.messages[0]
    assert "--sparse-decode-gamma " not in caplog.messages[0]


def test_a_rule_without_a_coverage_is_never_told(caplog: pytest.LogCaptureFixture) -> None:
    fill(CoverageHistory(None), 0.1)
    assert caplog.messages == []
