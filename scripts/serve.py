"""Starts an SGLang server with sparse decode, asks it a question about a long document, and keeps serving.

    serve.py [--port PORT] [--model FOLDER] [-- FLAGS OF sglang.launch_server]

``make serve`` calls this. Without a CUDA device the server runs on the CPU, in the environment that
``sglang_sparse.cpu`` describes.
Ctrl-C stops the server and everything that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any

import sample_model
from progress import Progress

HOST = "127.0.0.1"
LOG_FOLDER = Path(__file__).resolve().parent.parent / "build"
STOP_SECONDS = 5.0

FACT = "The name of the harbour master's dog is Biscuit."
QUESTION = "What is the name of the harbour master's dog?"


class ServeError(Exception):
    """Serving failed; the text says why, in one line, and may be followed by the end of the server's log."""


def check_port(port: int) -> None:
    with socket.socket() as probe:
        # As the server does it: connections of a stopped server that are still closing do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServeError(
                f"port {port} cannot be used ({error.strerror}): stop what listens there, or choose another one, as in "
                f"make serve PORT={port + 1}"
            ) from None


def document(sentences: int = 225, seed: int = 7) -> str:
    """A report on a small town with one fact of its own in the middle: about 3,000 tokens."""
    people = ["The baker", "The teacher", "A fisherman", "The postman", "The doctor", "An old sailor", "The gardener"]
    deeds = ["repaired", "painted", "sold", "borrowed", "carried", "measured", "cleaned", "looked for"]
    things = [
        "a wooden boat",
        "two lanterns",
        "the blue door",
        "a basket of apples",
        "the church clock",
        "a long ladder",
    ]
    places = ["near the mill", "at the market", "behind the school", "on the bridge", "by the river", "in the square"]
    times = ["early in the morning", "after the rain", "on Tuesday", "before sunset", "during the festival", "at noon"]
    choose = random.Random(seed).choice
    lines = [
        f"{choose(people)} {choose(deeds)} {choose(things)} {choose(places)} {choose(times)}." for _ in range(sentences)
    ]
    lines.insert(sentences // 2, FACT)
    return " ".join(lines)


def request(url: str, body: dict[str, Any] | None = None, timeout: float = 600.0) -> Any:
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    # A proxy in the environment is not meant for this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(call, timeout=timeout) as answer:
        text = answer.read()
    return json.loads(text) if text else None


class Server:
    """A server process in a session of its own, so that a Ctrl-C meant for this script does not reach it first."""

    def __init__(self, model: str, port: int, flags: list[str], environment: dict[str, str]) -> None:
        self.url = f"http://{HOST}:{port}"
        LOG_FOLDER.mkdir(exist_ok=True)
        self.log = LOG_FOLDER / f"serve-{port}.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        command += ["--host", HOST, "--port", str(port), *flags]
        print(f"Starting: {shlex.join(command)}")
        print(f"Its log:  {self.log}", flush=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def last_lines(self, count: int) -> list[str]:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").replace("\r", "\n").splitlines()
            return [line for line in lines if line.strip()][-count:]
        return []

    def check_alive(self) -> None:
        code = self.process.poll()
        if code is not None:
            ending = "".join(f"\n    {line}" for line in self.last_lines(15))
            raise ServeError(f"the server stopped with exit code {code}; the end of {self.log}:{ending}")

    def wait_until_ready(self, timeout: float) -> None:
        with Progress(f"Waiting for {self.url}/health") as progress:
            while True:
                self.check_alive()
                with contextlib.suppress(urllib.error.URLError, OSError):
                    request(f"{self.url}/health", timeout=5.0)
                    return
                if progress.seconds > timeout:
                    raise ServeError(f"the server was not ready after {timeout:.0f} s; see {self.log}")
                progress.note(f"log: {''.join(self.last_lines(1))}")
                time.sleep(0.5)

    def wait(self) -> None:
        self.process.wait()
        self.check_alive()

    def stop(self) -> None:
        """Ends the server and all processes of its group: politely first, and then, or at another Ctrl-C, for sure."""
        if self.process.poll() is None:
            with Progress("Stopping the server"), contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self.process.send_signal(signal.SIGINT)
                self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def ask(server: Server, model: str) -> None:
    """Sends one chat completion and prints the answer and what it took."""
    message = f"Read the text, then answer the question.\n\n{document()}\n\nQuestion: {QUESTION}"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": message}],
        "temperature": 0,
        "max_tokens": 64,
    }
    print(f"Question about a document of {len(document().split()):,} words: {QUESTION}")
    with Progress("Waiting for the answer") as progress:
        progress.note("the server reads the whole document before the first word")
        answer = request(f"{server.url}/v1/chat/completions", body)
        seconds = progress.seconds
    usage = answer["usage"]
    print(f"Answer: {answer['choices'][0]['message']['content'].strip()}")
    print(f"{usage['prompt_tokens']:,} prompt tokens, {usage['completion_tokens']} tokens of answer, {seconds:.1f} s")


def report_sparse_decode(server: Server) -> None:
    block = request(f"{server.url}/server_info")["internal_states"][0].get("sparse_decode")
    if block is None:
        raise ServeError(f"the server reports no sparse decode: the plugin is not active; see {server.log}")
    print(
        f"KV blocks attended to: {block['kept_fraction']:.1%} of all; "
        f"KV bytes read, with the search for these blocks: {block['bytes_read_fraction']:.1%}"
    )


def explain(server: Server, model: str) -> None:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is a lighthouse?"}]})
    print(f"""
Serving {model} at {server.url}, with an API like OpenAI's. From another terminal:

  curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d {shlex.quote(body)}

  curl {server.url}/server_info     # under internal_states: sparse_decode

Ctrl-C stops it.""")


def on_cpu() -> tuple[list[str], dict[str, str]]:
    """Flags and environment for this host: both empty where there is a CUDA device."""
    from sglang_sparse import cpu

    environment = cpu.environment()
    return (list(cpu.SERVER_FLAGS) if environment else []), environment


def serve(arguments: argparse.Namespace) -> None:
    check_port(arguments.port)
    if importlib.util.find_spec("sglang") is None:
        raise ServeError(f"{sys.executable} has no SGLang; without VENV=none, make serve installs it")
    model = arguments.model or str(sample_model.fetch())
    # A name without a folder may be one that SGLang resolves itself.
    if (os.path.isabs(model) or os.path.exists(model)) and not os.path.isfile(os.path.join(model, "config.json")):
        raise ServeError(f"{model} is no model folder: it has no config.json")
    flags, environment = on_cpu()
    name = Path(model).name
    flags += ["--served-model-name", name]
    if not arguments.dense:
        flags += ["--sparse-decode", "--sparse-decode-min-context", "512"]
    server = Server(model, arguments.port, [*flags, *arguments.flags], environment)
    try:
        server.wait_until_ready(arguments.timeout)
        ask(server, name)
        if not arguments.dense:
            report_sparse_decode(server)
        explain(server, name)
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
    except OSError as error:
        # What a dying server does to a request is less telling than its log.
        time.sleep(1.0)
        server.check_alive()
        raise ServeError(f"the server did not answer: {error}; see {server.log}") from error
    finally:
        server.stop()


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--model", default="", help="model folder; by default SmolLM2-135M-Instruct is fetched")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds until the server has to be ready")
    parser.add_argument("--dense", action="store_true", help="without sparse decode, to compare")
    parser.add_argument("flags", nargs="*", help="more flags for sglang.launch_server, after --")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        serve(arguments)
    except (ServeError, sample_model.ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.")
        return 130
    print("Stopped.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
