"""A wall clock that jumps, as it does when it is set: nothing measures time with it, and rates stay right."""

from __future__ import annotations

import ast
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparse_kernels import stopwatch, stopwatch_state
from sparse_kernels.stopwatch import START

from sglang_sparse.observe import metrics as observed
from sglang_sparse.top.__main__ import main as top

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DAY = 86_400.0

NAMES_A_MOMENT = {
    # The end of a Prometheus query.
    "scripts/draw_dashboard.py": {"time.time"},
    # The name and the date of a run.
    "benchmarks/results.py": {"datetime.datetime.now"},
}
"""Who asks for the wall clock's time, and not for a duration."""
WALL_CLOCK = {
    *("time.time", "time.time_ns", "time.clock_gettime", "time.localtime", "time.gmtime", "time.ctime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "datetime.datetime.now", "datetime.datetime.utcnow"),
    *("datetime.datetime.today", "datetime.date.today", "date.today"),
}


def wall_clock_calls(text: str) -> set[str]:
    """Names of the wall clock in a module's source, however `time` was imported."""
    module = ast.parse(text)
    found = {ast.unparse(node) for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            # Under another name, the above would miss it.
            assert not any(alias.name in ("time", "datetime") and alias.asname for alias in node.names)
    return found & WALL_CLOCK


def test_nothing_takes_durations_by_the_wall_clock() -> None:
    folders = ("sglang_sparse", "kernels", "scripts", "benchmarks", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): wall_clock_calls(path.read_text()) for path in files}
    assert {name: calls for name, calls in found.items() if calls} == NAMES_A_MOMENT


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import time\nstart = time.time()", {"time.time"}),
        ("from time import time_ns", {"time.time_ns"}),
        ("import datetime\ndatetime.datetime.now()", {"datetime.datetime.now"}),
        ("import time\ntime.monotonic()", set()),
    ],
)
def test_wall_clocks_are_found(text: str, found: set[str]) -> None:
    assert wall_clock_calls(text) == found


@pytest.fixture(params=[-DAY, DAY], ids=["back", "forward"])
def jumping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the wall clock finds it a day off the last one."""
    now, jumps = time.time(), itertools.count(1)
    monkeypatch.setattr(time, "time", lambda: now + request.param * next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (now + request.param * next(jumps))))
    assert abs(time.time() - time.time()) == pytest.approx(DAY)


@pytest.mark.usefixtures("jumping")
def test_the_stopwatch() -> None:
    state = stopwatch_state(1, "cpu")
    one = torch.ones(1, dtype=torch.int32)
    began = time.perf_counter_ns()
    stopwatch(one, state, phase=START)
    time.sleep(0.02)
    stopwatch(one, state, phase=0)
    assert 0.02e9 <= state[2] <= time.perf_counter_ns() - began


@pytest.mark.usefixtures("jumping")
def test_metrics_are_exported_at_their_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[bool] = []

    class Metrics:
        def __init__(self, *_: Any) -> None:
            pass

        def export_audit(self, wait: bool) -> None:
            pass

        def export_counters(self, wait: bool) -> None:
            exported.append(wait)

    monkeypatch.setattr(observed, "Metrics", Metrics)
    monkeypatch.setattr(observed, "EXPORT_SECONDS", 0.05)
    exporter = observed.MetricsExporter(SimpleNamespace())  # type: ignore[arg-type]
    reporter = SimpleNamespace(current_scheduler_metrics_enabled=True, is_stats_logging_rank=True)
    for _ in range(20):
        exporter.after_step(reporter)
    assert len(exported) == 1, "a jump brought the next export forward"
    time.sleep(0.06)
    exporter.after_step(reporter)
    assert len(exported) == 2, "a jump put the next export off"


@pytest.fixture
def top_modules() -> Iterator[Any]:
    sys.path.insert(0, str(TESTS / "top"))
    try:
        import fake_sparse_server

        yield fake_sparse_server
    finally:
        sys.path.remove(str(TESTS / "top"))


@pytest.mark.usefixtures("jumping")
def test_rates_of_top(top_modules: Any, capsys: pytest.CaptureFixture) -> None:
    before, after = (top_modules.block(steps, [[0.5, 0.5]]) for steps in (100, 400))
    began = time.monotonic()
    with top_modules.fake_server(before, after) as url:
        assert top(["--url", url, "--once", "--json", "--interval", "0.2"]) == 0
    interval = json.loads(capsys.readouterr().out)["interval"]
    assert 0.2 <= interval["seconds"] <= time.monotonic() - began
    assert interval["tokens_per_second"] == pytest.approx(300 / interval["seconds"])
