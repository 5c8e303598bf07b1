"""Dashboard and alert rules by themselves; tests/server checks that a server exports what they query."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from monitoring import ALERTS, ROOT, alert_rules, dashboard, panels

ALERT_TESTS = Path(__file__).parent / "alerts_test.yml"


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    return subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_panels_tile_the_board() -> None:
    boxes = [panel["gridPos"] for panel in dashboard()["panels"]]
    cells = [(box["x"] + x, box["y"] + y) for box in boxes for x in range(box["w"]) for y in range(box["h"])]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) == 23
    ids = sorted(panel["id"] for panel in dashboard()["panels"])
    assert all(a < b for a, b in pairwise(ids))


def test_every_panel_says_what_it_shows_and_reads_the_chosen_source() -> None:
    variables = {entry["name"] for entry in dashboard()["templating"]["list"]}
    assert variables == {"datasource", "instance", "model"}
    for panel in panels():
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {"instance", "model", "__rate_interval"}
            selectors = re.findall(r"sglang_sparse_\w+(\{[^}]*\})?|(\{__name__[^}]*\})", target["expr"])
            assert selectors
            assert all("$instance" in "".join(found) and "$model" in "".join(found) for found in selectors), target


def plain(expression: str) -> str:
    """A dashboard's query without Grafana's variables."""
    return expression.replace("$instance", ".*").replace("$model", ".*").replace("$__rate_interval", "1m")


def test_prometheus_understands_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [plain(target["expr"]) for panel in panels() for target in panel["targets"]]
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    result = promtool("check", "rules", file)
    assert result.returncode == 0, result.stdout + result.stderr


def test_alerts_fire_when_they_should() -> None:
    result = promtool("test", "rules", ALERT_TESTS)
    assert result.returncode == 0, result.stdout + result.stderr


def test_alert_rules_are_whole_and_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(SparseDecode\w+)` \|", text, re.MULTILINE))
    assert {rule["alert"] for rule in alert_rules()} == documented
    cases = yaml.safe_load(ALERT_TESTS.read_text())["tests"]
    tested = {test["alertname"] for case in cases for test in case["alert_rule_test"]}
    assert tested == documented
    for rule in alert_rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("info", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "$labels.instance" in rule["annotations"]["summary"]
    assert ALERTS.name in (ROOT / "docker" / "prometheus" / "prometheus.yml").read_text()
