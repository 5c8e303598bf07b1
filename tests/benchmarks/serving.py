"""A tiny server that answers as SGLang does, for tests of the clients."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from benchmarks.workload.prompts import common_prefix


class FakeServer(ThreadingHTTPServer):
    """Streams token `sum(prompt) % 1000 + i` as token i; remembers what it was asked and how many ran at once."""

    daemon_threads = True
    delay = 0.0
    """Seconds before each token."""
    incremental = True
    capacity = 10_000
    sparse = True
    missed_bytes: tuple[int, int] | None = None
    """Of a step, without and by forecasts; None without offload."""
    fail_after: int | None = None
    """Answers end in an error after so many requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.running = self.most_at_once = 0
        self.prompts: list[list[int]] = []
        self.seen: list[list[int]] = []
        self.changes: list[tuple[int, dict[str, Any]]] = []
        """Settings that were changed, and the prompts before each."""
        self.tokens = self.blocks = self.steps = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def info(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.sparse:
            block = {"kept_fraction": 0.25 if self.blocks else None, "bytes_read_fraction": 0.4}
            block |= {"tokens": self.tokens, "blocks": self.blocks, "steps": self.steps}
            if self.missed_bytes is not None:
                missed, used = (each * self.steps for each in self.missed_bytes)
                block["offload"] = {"missed_bytes": missed, "forecast": {"used_bytes": used} if used else None}
            state["sparse_decode"] = block
        return {"max_total_num_tokens": self.capacity, "internal_states": [state]}


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        content = json.dumps(self.server.info()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _change(self, body: dict[str, Any]) -> None:
        wrong = (body["gamma"] or 0) > 1
        content = b"gamma: has to be at most 1" if wrong else b"{}"
        if not wrong:
            self.server.changes.append((len(self.server.prompts), body))
        self.send_response(400 if wrong else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _score(self, prompt: list[int], count: int, top: int) -> None:
        """A sparse server gives each token a little less than a dense one does."""
        server = self.server
        with server.lock:
            server.running -= 1
        chance = 0.8 if server.sparse else 0.9
        ids = [(sum(prompt) + i) % 1000 for i in range(count)]
        places = [[[math.log(chance), i, None], [math.log((1 - chance) / 2), -1, None]][:top] for i in ids]
        content = json.dumps({"output_ids": ids, "meta_info": {"output_top_logprobs": places}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/sparse_decode":
            return self._change(body)
        prompt, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        with server.lock:
            server.prompts.append(prompt)
            fails = server.fail_after is not None and len(server.prompts) > server.fail_after
            server.running += 1
            server.most_at_once = max(server.most_at_once, server.running)
            shared = max((common_prefix([prompt, other]) for other in server.seen), default=0)
            cached = min(shared, len(prompt) - 1)
            server.seen.append(prompt)
            server.tokens += len(prompt) * count
            server.blocks += len(prompt) * count // 16
            server.steps += count
        if body.get("return_logprob"):
            return self._score(prompt, count, body["top_logprobs_num"])
        self.send_response(200)
        self.end_headers()
        ids: list[int] = []
        for i in range(count):
            time.sleep(server.delay)
            ids.append((sum(prompt) + i) % 1000)
            shown = ids[-1:] if server.incremental else ids
            event: dict[str, Any] = {
                "output_ids": shown,
                "meta_info": {"completion_tokens": len(ids), "cached_tokens": cached},
            }
            if fails:
                event = {"error": {"message": "out of memory"}}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        with server.lock:
            server.running -= 1
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
