"""An HTTP server that answers as SGLang with sparse decode does, with numbers that a test sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

OPTIONS = {"rule": "coverage", "gamma": 0.9, "gamma_by_layer": [], "gamma_by_head": [], "top_k": None}


def block(steps: int, kept: list[list[float]], **more: Any) -> dict[str, Any]:
    """A `sparse_decode` block after so many steps of one request of 100 tokens in 10 blocks."""
    return {
        "options": OPTIONS,
        "summary_bytes": 3_000_000,
        "steps": steps,
        "decoded_tokens": steps,
        "tokens": 100 * steps,
        "blocks": 10 * steps,
        "kept_fraction": sum(map(sum, kept)) / sum(map(len, kept)) if kept else None,
        "bytes_read_fraction": 0.1 + sum(map(sum, kept)) / sum(map(len, kept)) if kept else None,
        "kept_fraction_by_layer_and_head": kept,
        "audit": None,
        **more,
    }


def metrics(estimate: float, rest: float) -> str:
    model = 'model_name="a \\"tiny\\" {one}"'
    labels = f"{model},phase="
    return (
        f'sglang_sparse_timed_layer_seconds_total{{{labels}"estimate"}} {estimate}\n'
        f'sglang_sparse_timed_layer_seconds_total{{{labels}"rest"}} {rest}\n'
        f"sglang:num_running_reqs{{{model}}} 3.0\nsglang:num_queue_reqs{{{model}}} 1.0\n"
    )


@contextmanager
def fake_server(
    *blocks: dict[str, Any] | None, metric_texts: tuple[str, ...] = (), key: str | None = None
) -> Iterator[str]:
    """Yields the address of a server whose readings are `blocks` in turn, the last one again and again."""
    turns = {"/server_info": 0, "/metrics": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                return self.answer(401, "{}")
            if self.path not in turns:
                return self.answer(404, "")
            turn, turns[self.path] = turns[self.path], turns[self.path] + 1
            if self.path == "/metrics":
                if not metric_texts:
                    return self.answer(404, "")
                return self.answer(200, metric_texts[min(turn, len(metric_texts) - 1)])
            found = blocks[min(turn, len(blocks) - 1)]
            state = {} if found is None else {"sparse_decode": found}
            self.answer(200, json.dumps({"served_model_name": "tiny", "internal_states": [state]}))

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
