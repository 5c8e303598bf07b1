"""Starts a server for a benchmark and talks to it; standard library only, so that it runs on any GPU host."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any


class Server:
    """`python -m sglang.launch_server` with `flags`; a context manager."""

    def __init__(self, model: str, flags: list[str], log: Path, ready_seconds: float = 400) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.command = ["-m", "sglang.launch_server", "--model-path", model, *flags]
        self.log = log
        started = time.monotonic()
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *self.command, "--port", str(self.port)],
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
            if self.process.poll() is not None:
                break
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"the server did not become ready:\n{tail}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as response:
            return response.read()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The open response of a POST; read it or iterate over its lines."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=600)

    def chat(self, content: str, tokens: int) -> str:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": tokens,
        }
        with self.post("/v1/chat/completions", body) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    def sparse_info(self) -> dict[str, Any] | None:
        state = json.loads(self.get("/server_info"))["internal_states"][0]
        return state.get("sparse_decode")

    def token_times(self, prompt: list[int], tokens: int) -> list[float]:
        """Arrival times of the tokens of one greedy answer of exactly `tokens` tokens."""
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        times = []
        with self.post("/generate", body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
        return times

    def decode_ms(self, prompts: list[list[int]], tokens: int) -> float:
        """Median milliseconds between tokens while all `prompts` decode together."""
        results: list[list[float]] = [[] for _ in prompts]

        def run(index: int) -> None:
            results[index] = self.token_times(prompts[index], tokens)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if any(len(times) < tokens // 2 for times in results):
            raise RuntimeError("a request ended early")
        first, last = max(times[0] for times in results), min(times[-1] for times in results)
        gaps = [b - a for times in results for a, b in itertools.pairwise(times) if a >= first and b <= last]
        return sorted(gaps)[len(gaps) // 2] * 1e3
