"""The scripts behind ``make serve``: errors a newcomer meets, the checkout without installation, the lock file."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sparse.evaluate.lm_eval_parts import VERSION

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_serve_names_a_port_in_use() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = run(sys.executable, "scripts/serve.py", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr == (
        f"error: port {port} cannot be used (Address already in use): stop what listens there, or choose another one, "
        f"as in make serve PORT={port + 1}\n"
    )


@pytest.mark.server
def test_serve_shows_why_the_server_died(free_port: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = run(sys.executable, "scripts/serve.py", "--dense", "--port", str(free_port), "--model", str(tmp_path))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert re.fullmatch(r"error: the server stopped with exit code -?\d+; the end of \S+\.log:", lines[0])
    assert "Error" in lines[-1]
    log = Path(lines[0].split()[-1].rstrip(":"))
    log.unlink()


def test_local_site_shows_the_plugin_and_nothing_else() -> None:
    site = run(sys.executable, "scripts/local_site.py").stdout.strip()
    code = (
        "import importlib.metadata as m, importlib.util as u, sglang_sparse, sparse_kernels\n"
        "print([e.value for e in m.entry_points(group='sglang.srt.plugins')], m.version('sglang-sparse'))\n"
        "print([name for name in ('tests', 'benchmarks', 'scripts') if u.find_spec(name)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, "PYTHONPATH": site},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["['sglang_sparse.plugin:register'] 0.1.0", "[]"], done.stderr


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!;\s]", requirement)[0]).lower()


def test_lock_file_is_exact_and_holds_the_extras() -> None:
    lines = [line for line in (ROOT / "requirements/cpu.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    locked = {canonical(line): line for line in lines}
    project = (ROOT / "pyproject.toml").read_text()
    for extra in ("cpu", "dev", "eval"):
        listed = re.search(rf"^{extra} = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
        assert listed is not None
        names = {canonical(name) for name in re.findall(r'"(.+?)"', listed[1])}
        assert names
        assert names <= locked.keys(), names - locked.keys()
    assert f'gpu = ["{locked["sglang"]}"]' in project
    assert f"lm_eval=={VERSION}" == locked["lm-eval"]
    assert f'"lm-eval[api,ruler]=={VERSION}"' in project
