"""Starts the servers that are measured, one at a time."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.errors import BenchmarkError, ServerError

from .client import Client
from .ports import LOST, free_port

DENSE, SPARSE = "dense", "sparse"
DEFAULT_VARIANTS = {DENSE: "--attention-backend fa3", SPARSE: "--sparse-decode"}


class Server(Client):
    """`python -m sglang.launch_server` with `flags`; a context manager."""

    def __init__(self, model: str, flags: Sequence[str], log: Path, ready_seconds: float = 560) -> None:
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}")
        self.command = ["-m", "sglang.launch_server", "--model-path", model, *flags]
        self.log = log
        started = time.monotonic()
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *self.command, "--port", str(port)],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        try:
            self._wait(started + ready_seconds)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - started

    def _wait(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self.process.poll() is not None or LOST in self.log.read_text(errors="replace"):
                break
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        raise ServerError(f"the server did not become ready:\n{tail}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """What the benchmarks of servers have in common."""
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--dummy", action="store_true", help="random weights: the folder needs only a config")
    parser.add_argument("--tokenizer", help="folder of a tokenizer, if the model has none")
    parser.add_argument(
        "--variant",
        action="append",
        metavar="NAME=FLAGS",
        help="a server to measure, as flags of sglang.launch_server; the first is what others are compared with "
        "(default: 'dense=--attention-backend fa3' and 'sparse=--sparse-decode')",
    )
    parser.add_argument("--server-flags", default="", help="flags of sglang.launch_server for every variant")
    parser.add_argument(
        "--default-captures", action="store_true", help="SGLang's own decode graph sizes, not exact ones"
    )
    parser.add_argument("--prefill-graphs", action="store_true", help="capture SGLang's prefill graphs too")
    parser.add_argument("--logs", type=Path, default=Path(), help="folder of the servers' logs (default: here)")


def variants(args: argparse.Namespace) -> dict[str, list[str]]:
    """The servers to measure, in turn: name and flags. Raises BenchmarkError."""
    given: dict[str, str] = {}
    for text in args.variant or [f"{name}={flags}" for name, flags in DEFAULT_VARIANTS.items()]:
        name, equals, flags = text.partition("=")
        if not equals or not name.isidentifier() or name in given:
            raise BenchmarkError(
                f"--variant {text}: give a name of its own, =, and flags, such as sparse=--sparse-decode"
            )
        given[name] = flags
    try:
        return {name: shlex.split(flags) for name, flags in given.items()}
    except ValueError as error:
        raise BenchmarkError(f"--variant: {error}: quote the flags as in a shell") from None


def common_flags(args: argparse.Namespace, batches: Sequence[int]) -> list[str]:
    """Flags of every variant: decode graphs of exactly `batches`, short stream events, no prefill graphs."""
    flags = ["--incremental-streaming-output"]
    if not args.default_captures:
        flags += ["--cuda-graph-bs-decode", *map(str, sorted(set(batches)))]
    if not args.prefill_graphs:
        flags += ["--disable-prefill-cuda-graph"]
    if args.dummy:
        flags += ["--load-format", "dummy"]
    if args.tokenizer:
        flags += ["--tokenizer-path", args.tokenizer]
    return flags + shlex.split(args.server_flags)


def captures(args: argparse.Namespace) -> str:
    """What the column `case` says of the decode graphs."""
    return "SGLang's capture sizes" if args.default_captures else "exact capture sizes"


def check_places(args: argparse.Namespace) -> None:
    """Raises BenchmarkError if the model or the folder of the logs is not there."""
    if not (Path(args.model) / "config.json").is_file():
        raise BenchmarkError(f"--model {args.model}: there is no config.json: give the folder of a Hugging Face model")
    if not args.logs.is_dir():
        raise BenchmarkError(f"--logs {args.logs}: there is no such folder: make it, or name another")
