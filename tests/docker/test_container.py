"""What runs when the container starts, and the health check."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from monitoring import ROOT

ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"
HEALTHCHECK = ROOT / "docker" / "healthcheck.py"


@pytest.fixture
def container(tmp_path: Path) -> Any:
    """Runs the entry point where `python` only shows its arguments."""
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "cache").mkdir()

    def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "SGLANG_SPARSE_CACHE": str(tmp_path / "cache")}
        return subprocess.run(
            [str(ENTRYPOINT), *arguments], env=environment | variables, capture_output=True, text=True, check=False
        )

    return start


def test_arguments_go_to_the_server(container: Any) -> None:
    result = container("--model-path", "/a model", "--sparse-decode")
    assert result.stdout.splitlines() == [
        *("-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000"),
        *("--model-path", "/a model", "--sparse-decode"),
    ]


def test_the_port_is_the_health_checks(container: Any) -> None:
    assert "31000" in container("--model-path", "/m", SGLANG_SPARSE_PORT="31000").stdout.splitlines()


def test_a_command_runs_instead(container: Any) -> None:
    assert container("python", "-m", "sglang_sparse.top").stdout.splitlines() == ["-m", "sglang_sparse.top"]
    assert container().stdout.splitlines()[-1] == "--help"


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--port", "1"], {}, "set SGLANG_SPARSE_PORT instead"),
        (["--port=1"], {}, "set SGLANG_SPARSE_PORT instead"),
        (["--x"], {"SGLANG_SPARSE_PORT": "http"}, "SGLANG_SPARSE_PORT is 'http': give a port number"),
        (["--x"], {"SGLANG_SPARSE_CACHE": "/no/cache"}, "/no/cache is not writable for user"),
    ],
)
def test_refusals(container: Any, arguments: list[str], variables: dict[str, str], message: str) -> None:
    result = container(*arguments, **variables)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


class Health(BaseHTTPRequestHandler):
    status = 200
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def health() -> Iterator[tuple[type[Health], str]]:
    """A handler whose status a test sets, and the port that it answers on."""

    class Handler(Health):
        asked: list[str] = []  # noqa: RUF012

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield Handler, str(server.server_address[1])
    server.shutdown()
    server.server_close()


def check(port: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SGLANG_SPARSE_PORT": port} | variables
    return subprocess.run(
        [sys.executable, str(HEALTHCHECK)], env=environment, capture_output=True, text=True, check=False
    )


def test_healthy_only_if_a_token_is_generated(health: tuple[type[Health], str]) -> None:
    handler, port = health
    assert check(port).returncode == 0
    assert handler.asked == ["/health_generate"]
    handler.status = 503
    result = check(port)
    assert result.returncode == 1
    assert "503" in result.stderr


def test_a_proxy_of_the_host_is_not_asked(health: tuple[type[Health], str], free_port: int) -> None:
    _, port = health
    proxy = f"http://127.0.0.1:{free_port}"
    names = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
    assert check(port, **dict.fromkeys(names, proxy), no_proxy="", NO_PROXY="").returncode == 0


def test_not_healthy_without_a_server(free_port: int) -> None:
    for port in (str(free_port), "http"):
        result = check(port)
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1
