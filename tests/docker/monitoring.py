"""What the dashboard and the alert rules query."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docker" / "grafana" / "dashboards" / "sglang_sparse.json"
ALERTS = ROOT / "docker" / "prometheus" / "alerts.yml"
NAME = re.compile(r"\bsglang_sparse_\w+")
SGLANGS_NAME = re.compile(r"sglang\[:_\](\w+)")
"""SGLang's own names have a colon, which some releases of prometheus_client turn into an underscore for Prometheus."""


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def panels() -> list[dict[str, Any]]:
    """The panels that query something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def queried_names() -> set[str]:
    """Names of the series that the dashboard or an alert rule reads."""
    variables = [entry["definition"] for entry in dashboard()["templating"]["list"] if "definition" in entry]
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    text = " ".join([*variables, *queries, *(rule["expr"] for rule in alert_rules())])
    assert "sglang:" not in text
    return {*NAME.findall(text), *(f"sglang:{name}" for name in SGLANGS_NAME.findall(text))}
