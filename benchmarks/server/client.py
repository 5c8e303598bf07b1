"""Talks to a running server; standard library only, so that it runs on any GPU host."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from benchmarks.errors import ServerError

from .divergence import TOP, Scored


@dataclass
class Answer:
    """One streamed answer: when its tokens arrived, how many there were by then, and which."""

    started: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    """Prompt tokens found in the prefix cache."""

    @property
    def ttft(self) -> float:
        """Seconds from the request to the first output token."""
        return self.times[0] - self.started

    @property
    def tpot(self) -> float:
        """Seconds between output tokens, the first left out."""
        return (self.times[-1] - self.times[0]) / max(self.counts[-1] - self.counts[0], 1)


@dataclass(frozen=True)
class Missed:
    """Bytes a step that were not on the GPU: `waited` for, and `hidden` beside other work by a forecast."""

    waited: float
    hidden: float


@dataclass(frozen=True)
class ReadTotals:
    """What decode steps read since the server's start: shares, and the tokens and blocks that they are shares of."""

    kept: float
    bytes_read: float
    tokens: int
    blocks: int
    steps: int = 0
    missed_bytes: int | None = None
    """What came over PCIe while somebody waited; None without offload."""
    hidden_bytes: int = 0
    """What would have, had a forecast not brought it before."""

    def missed_since(self, before: ReadTotals | None) -> Missed | None:
        """Bytes a step of the steps since `before`; None without offload, or if there was no step."""
        steps = self.steps - (before.steps if before else 0)
        if self.missed_bytes is None or not steps:
            return None
        missed, hidden = ((before.missed_bytes or 0), before.hidden_bytes) if before else (0, 0)
        return Missed((self.missed_bytes - missed) / steps, (self.hidden_bytes - hidden) / steps)

    def since(self, before: ReadTotals | None) -> tuple[float, float] | None:
        """Kept and bytes read, as shares, of the steps since `before`; None if there was none."""
        tokens, blocks = (before.tokens, before.blocks) if before else (0, 0)
        if self.blocks == blocks:
            return None
        kept_then, scan_then = (before.kept, before.bytes_read - before.kept) if before else (0.0, 0.0)
        kept = (self.kept * self.blocks - kept_then * blocks) / (self.blocks - blocks)
        scanned = (self.bytes_read - self.kept) * self.tokens - scan_then * tokens
        return kept, kept + scanned / (self.tokens - tokens)


class Client:
    """Requests to the server at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as response:
            return response.read()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The open response of a POST; read it or iterate over its lines."""
        request = urllib.request.Request(
            f"{self.url}{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=1800)

    def chat(self, content: str, tokens: int) -> str:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": tokens,
        }
        with self.post("/v1/chat/completions", body) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    def generate(self, prompt: list[int], tokens: int) -> Answer:
        """The greedy answer of exactly `tokens` tokens, streamed.

        Raises ServerError if it ends early or the server reports an error.
        """
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        answer = Answer(time.perf_counter())
        lines = []
        with self.post("/generate", body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    # Read later: other streams wait for this thread.
                    lines.append((time.perf_counter(), line))
        for arrived, line in lines:
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise ServerError(f"the server answered: {event['error']}")
            count = event["meta_info"]["completion_tokens"]
            ids = event.get("output_ids", [])
            # Either all tokens so far, or those since the last event.
            answer.tokens = ids if len(ids) == count else answer.tokens + ids
            answer.cached = event["meta_info"].get("cached_tokens", 0)
            answer.times.append(arrived)
            answer.counts.append(count)
        if not answer.counts or answer.counts[-1] != tokens:
            raise ServerError(f"an answer ended after {answer.counts[-1:] or [0]} of {tokens} tokens")
        return answer

    def score(self, prompt: list[int], tokens: int) -> Scored:
        """The greedy answer of exactly `tokens` tokens, with the likeliest tokens at each of them."""
        body = {
            "input_ids": prompt,
            "return_logprob": True,
            "top_logprobs_num": TOP,
            "logprob_start_len": -1,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        with self.post("/generate", body) as response:
            answer = json.load(response)
        places = answer["meta_info"]["output_top_logprobs"]
        top = [{int(entry[1]): float(entry[0]) for entry in place} for place in places]
        return Scored([int(token) for token in answer["output_ids"]], top)

    def info(self) -> dict[str, Any]:
        return json.loads(self.get("/server_info"))

    def sparse_info(self) -> dict[str, Any] | None:
        """The `sparse_decode` block of /server_info; None from a dense server."""
        return self.info()["internal_states"][0].get("sparse_decode")

    def change(self, **settings: object) -> None:
        """Changes a sparse server's settings while it runs. Raises ServerError if it does not take them."""
        try:
            with self.post("/sparse_decode", settings) as response:
                response.read()
        except urllib.error.HTTPError as error:
            raise ServerError(f"the server answered: {error.read().decode(errors='replace').strip()}") from None

    def read_totals(self) -> ReadTotals | None:
        """What decode steps read so far; None from a dense server and before the first step."""
        block = self.sparse_info()
        if not block or block.get("kept_fraction") is None:
            return None
        offload = block.get("offload") or {}
        forecast = offload.get("forecast") or {}
        return ReadTotals(
            block["kept_fraction"],
            block["bytes_read_fraction"],
            block["tokens"],
            block["blocks"],
            block["steps"],
            offload.get("missed_bytes"),
            forecast.get("used_bytes", 0),
        )

    def token_capacity(self) -> int:
        """Tokens that the server's KV cache holds."""
        return int(self.info()["max_total_num_tokens"])
