"""The live audit of a running server, in `/server_info` and `/metrics`."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import requests

pytestmark = pytest.mark.server

FLAGS = (
    *("--sparse-decode", "--sparse-decode-min-context", "128", "--sparse-decode-window-tokens", "32"),
    *("--sparse-decode-gamma", "0.8", "--page-size", "32", "--chunked-prefill-size", "256"),
)
LAYERS, KV_HEADS, TOKENS = 2, 2, 24
METRIC = "sglang_sparse_coverage"


def prompts() -> list[list[int]]:
    generator = random.Random(1)
    return [[generator.randrange(256) for _ in range(length)] for length in (300, 64, 700, 1100)]


def ask(server: Any) -> list[list[int]]:
    """Answers one at a time, so that batches, and with them rounding, do not differ between servers."""
    return [answer["output_ids"] for answer in server.generate_many(prompts(), TOKENS, at_once=1)]


def metric(server: Any) -> dict[str, dict[str, float]]:
    """The audit's series, by layer: the name's suffix, with the bucket's bound, to the value."""
    response = requests.get(f"{server.url}/metrics", timeout=60)
    response.raise_for_status()
    series: dict[str, dict[str, float]] = {}
    for suffix, labels, value in re.findall(rf"^{METRIC}_(\w+)\{{(.*)\}} (\S+)$", response.text, re.MULTILINE):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert named["model_name"]
        assert named["tp_rank"] == "0"
        bound = f" {named['le']}" if "le" in named else ""
        series.setdefault(named["layer"], {})[suffix + bound] = float(value)
    return series


def test_every_step_can_be_audited_and_the_answers_are_the_same(start_server: Any, random_llama: Path) -> None:
    unaudited = start_server(random_llama, *FLAGS, "--sparse-decode-audit-rate", "0")
    expected = ask(unaudited)
    assert unaudited.sparse_info()["audit"] is None
    unaudited.stop()

    server = start_server(random_llama, *FLAGS, "--sparse-decode-audit-rate", "1", "--enable-metrics")
    assert ask(server) == expected
    # A sample is measured when the next forward begins, and exported after that.
    server.generate(prompts()[1], 3)

    info = server.sparse_info()
    audit = info["audit"]
    assert info["kept_fraction"] < 0.9, "every block was read"
    assert audit["rate"] == 1
    # The prefill gives the first token, the overlap scheduler may run a step past the last; 64 tokens stay below the
    # minimum context.
    assert 3 * (TOKENS - 1) <= audit["samples"] <= 3 * TOKENS
    assert set(audit["by_layer"]) == {str(layer) for layer in range(LAYERS)}
    assert audit["worst_layer"] in range(LAYERS)
    assert sum(layer["count"] for layer in audit["by_layer"].values()) == audit["samples"] * KV_HEADS
    for layer in audit["by_layer"].values():
        assert sum(layer["histogram"].values()) == layer["count"]
    # A 4-bit thumbnail of this model's keys is close: the true coverage is near the one asked for.
    assert 0.75 < audit["mean_coverage"] < 0.95

    series = metric(server)
    assert set(series) == set(audit["by_layer"])
    for name, layer in audit["by_layer"].items():
        assert series[name]["count"] == series[name]["bucket +Inf"] == series[name]["bucket 1.0"] == layer["count"]
        assert series[name]["sum"] == pytest.approx(layer["count"] * layer["mean"])
        below = sum(count for bound, count in layer["histogram"].items() if float(bound) <= 0.8)
        assert series[name]["bucket 0.8"] == below


def test_exact_masses_always_reach_gamma_while_pages_are_reused(start_server: Any, random_llama: Path) -> None:
    """Requests come and go in a pool that holds few of them. A page measured too late would hold other keys."""
    server = start_server(
        random_llama,
        *FLAGS[:-6],
        *("--sparse-decode-gamma", "0.81", "--sparse-decode-estimator", "exact", "--sparse-decode-audit-rate", "1"),
        *("--page-size", "32", "--chunked-prefill-size", "256", "--max-total-tokens", "4096", "--disable-radix-cache"),
    )
    generator = random.Random(2)
    asked = [[generator.randrange(256) for _ in range(generator.randrange(150, 900))] for _ in range(40)]
    server.generate_many(asked, 4, at_once=3)
    info = server.sparse_info()
    assert info["kept_fraction"] < 0.95
    assert info["audit"]["samples"] > 20
    for layer in info["audit"]["by_layer"].values():
        assert all(count == 0 for bound, count in layer["histogram"].items() if float(bound) <= 0.8), layer
