"""The drawing of the dashboard, from a Prometheus that answers every query with two made-up series."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from monitoring import ROOT, panels

sys.path.insert(0, str(ROOT / "scripts"))

import draw_dashboard

pytest.importorskip("matplotlib")


@pytest.fixture
def prometheus() -> Iterator[tuple[type[Any], str]]:
    class Handler(BaseHTTPRequestHandler):
        asked: list[str] = []  # noqa: RUF012
        empty = False

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(address.query).items()}
            self.asked.append(query["query"])
            result: list[dict[str, Any]] = []
            for layer in () if self.empty else ("0", "1"):
                metric = {"layer": layer, "layer_group": layer, "phase": layer, "kind": layer}
                if address.path.endswith("query_range"):
                    times = [float(query["start"]) + n * float(query["step"]) for n in range(5)]
                    values = [[at, value] for at, value in zip(times, ("0.1", "NaN", "0.3", "0.2", "NaN"), strict=True)]
                    result.append({"metric": metric, "values": values})
                else:
                    result.append({"metric": metric, "value": [float(query["time"]), "0.93"]})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": {"result": result}}).encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield Handler, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_every_query_is_asked_and_a_picture_is_there(prometheus: tuple[type[Any], str], tmp_path: Path) -> None:
    handler, url = prometheus
    out = tmp_path / "board.png"
    assert draw_dashboard.main([str(out), "--prometheus", url, "--minutes", "1"]) == 0
    assert len(handler.asked) == sum(len(panel["targets"]) for panel in panels())
    assert not any("$" in query for query in handler.asked)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["board.png"]


def test_a_prometheus_without_series(
    prometheus: tuple[type[Any], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prometheus[0].empty = True
    assert draw_dashboard.main([str(tmp_path / "board.png"), "--prometheus", prometheus[1]]) == 1
    assert "has no series of the dashboard" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_prometheus(tmp_path: Path, free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port}"
    assert draw_dashboard.main([str(tmp_path / "board.png"), "--prometheus", url]) == 1
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert f"no Prometheus answers at {url}" in captured


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.123, "percentunit", "12.3%"),
        (2.5e9, "bytes", "2.5 GB"),
        (56e6, "bytes", "56 MB"),
        (0.0025, "s", "2.5 ms"),
        (12.34, "none", "12.3"),
        (float("nan"), "none", "no data"),
    ],
)
def test_units(value: float, unit: str, expected: str) -> None:
    assert draw_dashboard.in_unit(value, unit) == expected
