"""Starts real SGLang servers and talks to them."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from benchmarks.server.ports import LOST, free_port
from sglang_sparse import cpu
from sglang_sparse.sglang_compat import OWN_POOL_RELEASES

# A greedy answer may only differ where rounding decides; fp32 leaves no such place in these tests.
CPU_FLAGS = (*cpu.SERVER_FLAGS, "--dtype", "float32")
# Prefill graphs would take most of a start.
CUDA_FLAGS = (
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "16384", "--max-running-requests", "16"),
    "--disable-prefill-cuda-graph",
)
ON_CUDA = torch.cuda.is_available()
START_SECONDS = 300
# KV of CUDA servers is fp16: models of tests have fp32 weights, which SGLang then takes as fp16.
KV_ITEM_BYTES = 2 if ON_CUDA else 4
# How sure a model must be of a token, in nats, for another way of adding up in 16 bits not to take the second best: a
# block that is kept for another counts too. In fp16 the logits of the random Llama of two layers were off by 0.4 (root
# mean square of 200 places; 2.5 at most), and half its places have a margin above 3.9.
SURE = 1.0 if ON_CUDA else 0.0


def command(model: Path | str, *flags: str, port: int | None = None) -> list[str]:
    """The command line of a small server; on any free port unless one is given."""
    port = free_port() if port is None else port
    device_flags = CUDA_FLAGS if ON_CUDA else CPU_FLAGS
    base = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    # Without --sleep-on-idle an idle scheduler spins, and two servers on two cores starve each other.
    return [*base, *device_flags, *(() if "--sleep-on-idle" in device_flags else ("--sleep-on-idle",)), *flags]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, **cpu.environment(), **extra}


class Server:
    """A running server; a context manager. `flags` follow the small server's own."""

    def __init__(self, model: Path | str, *flags: str, log: Path, **env: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command(model, *flags, port=self.port),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(SGLANG_SPARSE_DECODE_SELF_CHECK="1", **env),
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited with {self.process.returncode}:\n{self.tail()}")
            if LOST in self.log.read_text(errors="replace"):
                raise RuntimeError(f"port {self.port} was taken while the server started:\n{self.tail()}")
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"the server was not ready after {START_SECONDS} s:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def post(self, path: str, body: dict[str, Any], **kwargs: Any) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, timeout=600, **kwargs)

    def generate(
        self, prompt: list[int] | str, tokens: int, *, margins: bool = False, **sampling: Any
    ) -> dict[str, Any]:
        """Greedy generation from token ids or text; with `margins`, as `assert_same_answers` expects them."""
        key = "text" if isinstance(prompt, str) else "input_ids"
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
        logprobs = {"return_logprob": True, "top_logprobs_num": 2} if margins else {}
        response = self.post("/generate", {key: prompt, "sampling_params": params, **logprobs})
        response.raise_for_status()
        return response.json()

    def generate_many(
        self, prompts: list[list[int]], tokens: int, at_once: int, *, margins: bool = False
    ) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, tokens, margins=margins), prompts))

    def chat(self, content: str, tokens: int) -> str:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": tokens,
        }
        response = self.post("/v1/chat/completions", body)
        response.raise_for_status()
        return response.json()["choices"][0]["message"]["content"]

    def flush(self) -> None:
        self.post("/flush_cache", {}).raise_for_status()

    def sparse_info(self) -> dict[str, Any]:
        """The `sparse_decode` block of `/server_info`, self-check included."""
        response = requests.get(f"{self.url}/server_info", timeout=120)
        response.raise_for_status()
        return response.json()["internal_states"][0]["sparse_decode"]

    def idle_info(self) -> dict[str, Any]:
        """`sparse_info` once no request is left in the pools."""
        for _ in range(60):
            info = self.sparse_info()
            check = info["self_check"]
            if check["free_requests"] == check["total_requests"]:
                return info
            time.sleep(0.5)
        raise AssertionError(f"requests are still in the pool: {check}\n{self.tail()}")


def assert_same_answers(answers: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Greedy answers have the same tokens. On a GPU an answer may part from the expected one, which was asked for with
    `margins`, with the second best token where the model was not sure of the best; what comes after is another text and
    not compared."""
    compared = 0
    for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        got, tokens = answer["output_ids"], wanted["output_ids"]
        assert len(got) == len(tokens)
        parted = next((place for place, pair in enumerate(zip(got, tokens, strict=True)) if pair[0] != pair[1]), None)
        compared += len(tokens) if parted is None else parted
        if parted is not None:
            best, second = wanted["meta_info"]["output_top_logprobs"][parted][:2]
            margin = best[0] - second[0]
            problem = f"answer {number}, token {parted}: {got[parted]} for {tokens[parted]}, {margin} nats, {second}"
            assert margin < SURE, problem
            assert got[parted] == second[1], problem
    assert compared > sum(len(wanted["output_ids"]) for wanted in expected) / 4, "too little could be compared"


def skip_unless_served(flags: Sequence[str]) -> None:
    """Skips the test if the flags ask for a KV pool of our own, which this SGLang release has not been tested with."""
    asked = {"--sparse-decode-offload", "--sparse-decode-kv-format"} & set(flags)
    release = importlib.metadata.version("sglang").split("+")[0]
    if asked and release not in OWN_POOL_RELEASES:
        pytest.skip(f"{asked.pop()} has not been tested with SGLang {release}")


def servers(tmp_path_factory: Any) -> Iterator[Any]:
    """Yields a function that starts a server, or returns the running one with the same arguments; stops all after."""
    folder = tmp_path_factory.mktemp("servers")
    running: dict[tuple, Server] = {}
    # Tests start servers in several threads.
    numbers = itertools.count()

    def get(model: Path | str, *flags: str, **env: str) -> Server:
        skip_unless_served(flags)
        key = (str(model), flags, tuple(sorted(env.items())))
        if key not in running:
            running[key] = Server(model, *flags, log=folder / f"server{next(numbers)}.log", **env)
        return running[key]

    try:
        yield get
    finally:
        for server in running.values():
            server.stop()
