"""`/metrics` of a running server: every documented name, no label of a request, and what the dashboard asks for."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[1] / "docker"))

import monitoring

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
PREFIX = "sglang_sparse_"
OFFLOADS = (f"{PREFIX}offload_", f"{PREFIX}forecast_")
FLAGS = (
    *("--sparse-decode", "--sparse-decode-min-context", "128", "--sparse-decode-window-tokens", "32"),
    *("--sparse-decode-gamma", "0.8", "--page-size", "32", "--sparse-decode-audit-rate", "1", "--enable-metrics"),
)
LABELS = {"layer_group", "kind", "phase", "layer", "le"}
Samples = dict[str, list[tuple[dict[str, str], float]]]


def scrape(server: Any) -> Samples:
    response = requests.get(f"{server.url}/metrics", timeout=60)
    response.raise_for_status()
    samples: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(value for found, value in samples[PREFIX + name] if labels.items() <= found.items())


def ask(server: Any, length: int, tokens: int) -> None:
    generator = random.Random(length)
    server.generate([generator.randrange(256) for _ in range(length)], tokens)


def settled(server: Any) -> Samples:
    """What `/metrics` shows once the server has fallen idle, which is when it exports the last steps."""
    server.idle_info()
    before: Samples | None = None
    for _ in range(40):
        samples = scrape(server)
        if before is not None and samples[f"{PREFIX}steps_total"] == before[f"{PREFIX}steps_total"]:
            return samples
        before = samples
        time.sleep(0.5)
    raise AssertionError("the counters of an idle server keep growing")


def test_metrics_of_a_server(start_server: Any, random_llama: Path) -> None:
    server = start_server(random_llama, *FLAGS)
    ask(server, 60, 12)
    short, info = settled(server), server.sparse_info()
    assert total(short, "steps_total", kind="sparse") == 0
    assert total(short, "steps_total", kind="dense") == info["steps"] >= 11
    assert total(short, "kept_bytes_total") == total(short, "kv_bytes_total") > 0

    ask(server, 900, 30)
    samples, info = settled(server), server.sparse_info()

    assert 29 <= total(samples, "steps_total", kind="sparse") <= 30
    assert total(samples, "steps_total") == info["steps"]
    kept, read = total(samples, "kept_bytes_total"), total(samples, "scan_bytes_total")
    everything = total(samples, "kv_bytes_total")
    # Bytes weigh the exporter's intervals by tokens, `/server_info` weighs by blocks, of which the last are not full.
    assert kept / everything == pytest.approx(info["kept_fraction"], rel=0.04)
    assert (kept + read) / everything == pytest.approx(info["bytes_read_fraction"], rel=0.04)
    assert info["kept_fraction"] < 0.9
    by_layer = info["kept_fraction_by_layer_and_head"]
    for group, heads in zip(("first", "middle"), by_layer, strict=True):
        share = total(samples, "kept_bytes_total", layer_group=group) / (everything / 2)
        assert share == pytest.approx(sum(heads) / len(heads), rel=0.04)
        observations = total(samples, "kept_fraction_count", layer_group=group)
        assert 1 <= observations == total(samples, "bytes_read_fraction_count", layer_group=group)

    assert total(samples, "gamma") == pytest.approx(0.8)
    assert total(samples, "summary_bytes") == info["summary_bytes"]
    assert total(samples, "coverage_count") == sum(layer["count"] for layer in info["audit"]["by_layer"].values())

    assert total(samples, "timed_layers_total") == info["steps"]
    for phase in ("estimate", "rule", "attention", "rest"):
        assert total(samples, "timed_layer_seconds_total", phase=phase) > 0
    # A layer of this model takes less than the step, and a step at most what the requests took.
    assert total(samples, "timed_layer_seconds_total") < 600

    check_names(samples)
    check_scrape(server, samples)
    check_top(server, samples)


def check_names(samples: Samples) -> None:
    # Those of offload are there with offload alone: `tests/test_metrics.py`.
    missing = {name for name in monitoring.queried_names() if not name.startswith(OFFLOADS)} - set(samples)
    assert not missing, f"the dashboard or the alert rules query what the server does not export: {sorted(missing)}"

    ours = {name for name in samples if name.startswith(PREFIX)}
    documented = set(re.findall(rf"`({PREFIX}\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in ours}
    assert families == {name for name in documented if not name.startswith(OFFLOADS)}

    sglangs = {name for labels, _ in samples["sglang:num_running_reqs"] for name in labels}
    for name in ours:
        for labels, _ in samples[name]:
            assert set(labels) - sglangs <= LABELS, f"{name} has other labels: {labels}"


def check_scrape(server: Any, samples: Samples) -> None:
    """Prometheus asks for OpenMetrics, where prometheus_client may rewrite names with colons: ours stay the same."""
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    response = requests.get(f"{server.url}/metrics", headers={"Accept": accept}, timeout=60)
    assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    names = set(re.findall(rf"^({PREFIX}\w+)\{{", response.text, re.MULTILINE))
    assert names == {name for name in samples if name.startswith(PREFIX)}


def check_top(server: Any, samples: Samples) -> None:
    """`python -m sglang_sparse.top` sees what `/metrics` and `/server_info` show."""
    command = [sys.executable, "-m", "sglang_sparse.top", "--url", server.url, "--once", "--interval", "0.2"]
    result = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    shown = json.loads(result.stdout)
    assert shown["since_start"]["steps"] == total(samples, "steps_total")
    assert len(shown["since_start"]["kept_fraction_by_layer"]) == 2
    assert shown["running_requests"] == 0
    times = {name: total(samples, "timed_layer_seconds_total", phase=name) for name in ("estimate", "rest")}
    shares = shown["since_start"]["time_shares"]
    assert shares["estimate"] / shares["rest"] == pytest.approx(times["estimate"] / times["rest"])
    assert shown["coverage"]["samples"] == server.sparse_info()["audit"]["samples"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "gamma 0.8" in result.stdout


def test_without_enable_metrics_the_endpoint_says_so(start_server: Any, random_llama: Path) -> None:
    server = start_server(random_llama, *(flag for flag in FLAGS if flag != "--enable-metrics"))
    ask(server, 300, 4)
    response = requests.get(f"{server.url}/metrics", timeout=60)
    assert response.status_code == 404
    assert response.json() == {"error": {"message": "there are no metrics: start the server with --enable-metrics"}}
    assert server.sparse_info()["steps"] >= 3
