"""Bad input: one line that says what to do, exit code 2, and no file."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import FakeServer

from sglang_sparse.evaluate.__main__ import main

# As if a package were not installed.
WITHOUT = """
import runpy, sys
missing = sys.argv[1]
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name}", name=name)
sys.meta_path.insert(0, Refuse())
sys.argv = ["evaluate", *sys.argv[2:]]
runpy.run_module("sglang_sparse.evaluate", run_name="__main__")
"""


def refused(capsys: pytest.CaptureFixture[str], command: list[str], message: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    try:
        code: object = main(command)
    except SystemExit as stop:
        code = stop.code
    lines = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith("Requesting API")]
    assert code == 2
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "niah_single_7"], "--tasks: there is no task niah_single_7: use niah_single_1"),
        (["--tasks", "niah_single_2"], "--tasks: niah_single_2 downloads its texts"),
        (["--tasks", "ruler_vt", "ruler_vt"], "--tasks: a task is named twice"),
        (["--lengths", "100"], "--lengths: 100 is too short"),
        (["--lengths", "0"], "'0' is not a positive number"),
        (["--lengths", "900", "900"], "--lengths: a length is named twice"),
        (["--samples", "501"], "--samples: lm-eval makes 500 at most"),
        (["--tokenizer", "/nowhere"], "--tokenizer: /nowhere is not a folder"),
        (["--tokenizer", "{tmp}"], "--tokenizer: .* holds no tokenizer"),
        (["--tokenizer", "{tmp}/damaged"], "--tokenizer: .* cannot be loaded"),
        (["--prepare", "{tmp}/none/x.json"], "--prepare: the folder .* is not there"),
        (["--prepare", "{tmp}"], "--prepare: .* is a folder"),
        (["--prepare", "{tmp}/x.txt"], r"--prepare: .* has to end in \.json or \.gz"),
        (["--lengths", "600", "--tasks", "ruler_vt"], "--lengths: 600 is too short for ruler_vt"),
        (["--lengths", "300", "--tasks", "ruler_cwe"], "--lengths: 300 is too short for ruler_cwe"),
    ],
)
def test_preparing(
    options: list[str], message: str, word_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    command = ["ruler", "--tokenizer", str(word_tokenizer), "--prepare", str(tmp_path / "x.json"), "--samples", "2"]
    refused(capsys, [*command, *(option.format(tmp=tmp_path) for option in options)], message, tmp_path)


def run(server: FakeServer, samples: Path, tmp_path: Path) -> list[str]:
    command = ["ruler", "--base-url", server.url, "--samples-from", str(samples), "--out", str(tmp_path / "x.json")]
    return [*command, "--concurrency", "4"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base-url", "127.0.0.1:1"], "--base-url: 127.0.0.1:1 does not start with http"),
        (["--base-url", "http://127.0.0.1:{port}"], "--base-url: no server answers at http://127.0.0.1"),
        (["--model", "other"], "--model: the server has fake, not other"),
        (["--out", "{tmp}/none/x.json"], "--out: the folder .* is not there"),
        (["--samples-from", "{tmp}/none.json"], "--samples-from: .* cannot be read"),
        (["--samples-from", "{tmp}/empty.json"], "--samples-from: .* is empty"),
        (["--prepare", "{tmp}/y.json"], "exclude each other"),
        (["--context", "500"], "--lengths: .* needs [0-9]+ tokens .* may have 500"),
        (["--timeout", "soon"], "'soon' is not a positive number"),
    ],
)
def test_running(
    options: list[str],
    message: str,
    server: FakeServer,
    samples: Path,
    free_port: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.json").touch()
    options = [option.format(port=free_port, tmp=tmp_path) for option in options]
    refused(capsys, [*run(server, samples, tmp_path), *options], message, tmp_path)
    assert server.requests == []


def test_a_server_with_a_short_context(
    server: FakeServer, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.context = 700
    refused(capsys, run(server, samples, tmp_path), r"may have 700: give it a larger --context-length", tmp_path)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"text": "", "finish_reason": "abort"}, r"broke off its answer to ruler_\w+ 900 \(finish_reason abort\)"),
        ({"text": None}, "lack a text"),
        ({"text": " "}, "all 18 answers are empty"),
        ({"index": 5}, "is no completion"),
    ],
)
def test_answers_that_are_none(
    reply: dict[str, object],
    message: str,
    server: FakeServer,
    samples: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_sparse.evaluate.client.RETRIES", 1)
    server.reply = lambda prompt: reply
    refused(capsys, run(server, samples, tmp_path), message, tmp_path)


def test_a_server_that_fails(
    server: FakeServer,
    samples: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_sparse.evaluate.client.RETRIES", 1)
    server.status = 500
    refused(capsys, run(server, samples, tmp_path), "a request failed .*the model has stopped", tmp_path)


def test_a_tokenizer_that_is_not_the_servers(
    server: FakeServer, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.count = len
    refused(capsys, run(server, samples, tmp_path), "--tokenizer is not the model's", tmp_path)


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("lm_eval", ["ruler", "--samples-from", "{samples}", "--out", "{tmp}/x.json"]),
        ("tenacity", ["ruler", "--samples-from", "{samples}", "--out", "{tmp}/x.json"]),
        ("wonderwords", ["ruler", "--prepare", "{tmp}/x.json"]),
        ("matplotlib", ["needle", "--out", "{tmp}/x.json", "--plot", "{tmp}/x.png"]),
    ],
)
def test_a_package_is_missing(
    package: str, options: list[str], server: FakeServer, samples: Path, word_tokenizer: Path, tmp_path: Path
) -> None:
    command = [option.format(samples=samples, tmp=tmp_path) for option in options]
    command += ["--base-url", server.url, "--tokenizer", str(word_tokenizer)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"error: the package {package} is not installed: pip install 'sglang-sparse[eval]'\n"
    assert list(tmp_path.iterdir()) == []


def test_no_page_of_models(tmp_path: Path, samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sglang_sparse.evaluate.server.TIMEOUT_SECONDS", 0.2)
            command = ["ruler", "--base-url", url, "--samples-from", str(samples), "--out", str(tmp_path / "x.json")]
            refused(capsys, command, "no server answers", tmp_path)
