"""The examples run as their first lines say, against servers that they find or start."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import pytest
import requests

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
        env=harness.environment(**environment),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def server(start_server: Any, smollm2: Path) -> Any:
    return start_server(smollm2, "--sparse-decode", "--sparse-decode-min-context", "256")


def test_openai_client(server: Any) -> None:
    printed = run(sys.executable, EXAMPLES / "openai_client.py", "What is a lighthouse?", server.url)
    answer, _, last = printed.strip().rpartition("\n")
    assert len(answer.split()) > 5
    assert re.fullmatch(r"KV blocks attended to since the start: .*%, in \d+ decode steps", last)


def test_chat(server: Any) -> None:
    assert len(run("bash", EXAMPLES / "chat.sh", "What is a lighthouse?", PORT=str(server.port)).split()) > 5


def test_per_request_gamma(server: Any) -> None:
    lines = run(sys.executable, EXAMPLES / "per_request_gamma.py", server.url).strip().splitlines()
    found = [re.search(r"read ([\d.]+)% of", line) for line in lines]
    shares = [float(match[1]) for match in found if match]
    assert len(shares) == 3
    assert shares[0] == 100
    assert shares[0] > shares[1] > shares[2] > 0


def test_engine(smollm2: Path) -> None:
    printed = run(sys.executable, EXAMPLES / "engine.py", smollm2)
    assert re.search(r"[\d.]+% of the KV blocks attended to", printed)


def test_calibrate_then_serve(random_llama: Path, tmp_path: Path, free_port: int) -> None:
    prompts = tmp_path / "prompts.jsonl"
    kinds = ("lighthouse", "harbour", "bridge")
    texts = [f"The {kind} keeper wrote down the weather of the day. " * 8 for kind in kinds]
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    log = tmp_path / "log"
    calibrate = "--target-kl 0.05 --gamma-per model --tokens 4 --context 512 --device cpu"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                "bash",
                EXAMPLES / "calibrate_then_serve.sh",
                random_llama,
                prompts,
                "--port",
                str(free_port),
                *harness.CPU_FLAGS,
            ],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=harness.environment(PYTHON=sys.executable, CALIBRATE_FLAGS=calibrate),
        )
    try:
        deadline = time.monotonic() + 540
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                if requests.get(f"http://127.0.0.1:{free_port}/health", timeout=5).ok:
                    break
            except requests.RequestException:
                time.sleep(0.5)
        info = requests.get(f"http://127.0.0.1:{free_port}/server_info", timeout=60).json()
        options = info["internal_states"][0]["sparse_decode"]["options"]
        assert options["model"]["architecture"] == "LlamaForCausalLM"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


@pytest.mark.parametrize("example", ["calibrate_then_serve.sh", "engine.py"])
def test_without_arguments_an_example_says_what_it_wants(example: str) -> None:
    interpreter = "bash" if example.endswith(".sh") else sys.executable
    result = subprocess.run(
        [interpreter, str(EXAMPLES / example)],
        env=harness.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode in (1, 2)
    assert result.stderr.splitlines()[-1].startswith("error: give the model's folder")
