"""The server that a soak runs against, and what is looked at between rounds."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import harness
import psutil
import requests
from soak_plan import Scale

# Small pages, chunks and batches; hardly any reserve for tokens to come, so that running requests are retracted.
_FLAGS = (
    *("--sparse-decode", "--sparse-decode-window-tokens", "32", "--sparse-decode-gamma", "0.9"),
    *("--max-running-requests", "8", "--schedule-conservativeness", "0.1"),
    *("--enable-metrics", "--log-level-http", "warning"),
    # Replays give tokens (soak_forced.py).
    "--enable-custom-logit-processor",
)
MODES: dict[str, tuple[str, ...]] = {
    "resident": (),
    # A few slots a layer and KV head.
    "offloaded": (
        *("--sparse-decode-offload", "--sparse-decode-host-memory", "0.2"),
        *("--sparse-decode-hot-cache", "0.0002"),
    ),
    "split": ("--sparse-decode-kv-format", "split"),
}
_COMPLAINTS = ("leak", "double free", "use-after-free", "Traceback", "Scheduler hit an exception")
"""What SGLang logs when its own idle checks fail, or when something raised."""


def start(model: Path, mode: str, log: Path, scale: Scale, **env: str) -> harness.Server:
    sizes = {
        "--page-size": scale.page_size,
        "--max-total-tokens": scale.pool_tokens,
        "--chunked-prefill-size": scale.chunk,
        "--sparse-decode-min-context": scale.min_context,
    }
    flags = [str(part) for pair in sizes.items() for part in pair]
    # As tests/conftest.py has it; `make soak` runs without pytest.
    return harness.Server(model, *_FLAGS, *flags, *MODES[mode], log=log, OMP_NUM_THREADS="1", **env)


def flush(server: harness.Server) -> None:
    """Empties the cache once nothing runs or waits: the last step may outlast the answer, and the server learns late
    that some clients are gone."""
    server.post("/flush_cache?timeout=60", {}).raise_for_status()


def model_path(server: harness.Server) -> Path:
    """The folder of the weights that the server has."""
    response = requests.get(f"{server.url}/model_info", timeout=60)
    response.raise_for_status()
    return Path(response.json()["model_path"])


def load_weights(server: harness.Server, model: Path) -> None:
    """Gives a quiet server the weights in `model`, and an empty cache."""
    server.post("/update_weights_from_disk", {"model_path": str(model)}).raise_for_status()


@dataclasses.dataclass(frozen=True)
class Counts:
    """SGLang's own counters since the server started."""

    evicted_tokens: int
    retractions: int

    @classmethod
    def read(cls, server: harness.Server) -> Counts:
        response = requests.get(f"{server.url}/metrics", timeout=60)
        response.raise_for_status()
        return cls(
            _sum(response.text, "sglang:evicted_tokens_total"),
            _sum(response.text, "sglang:num_retracted_requests_total"),
        )


def _sum(text: str, name: str) -> int:
    return int(sum(float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)))


def problems(check: dict[str, Any], *, idle: bool) -> list[str]:
    """What the self-check of a server finds wrong; of an idle one, leaks too."""
    found = [f"{check[name]} {name}" for name in ("stale_pages", "wrong_slots") if check[name]]
    if idle:
        lost = check["total_tokens"] - check["free_tokens"] - check["cached_tokens"]
        if lost:
            found.append(f"{lost} of {check['total_tokens']} KV slots leaked")
        if check["free_requests"] != check["total_requests"]:
            found.append(f"{check['total_requests'] - check['free_requests']} request slots leaked")
    return found


def complaints(server: harness.Server) -> list[str]:
    lines = server.log.read_text(errors="replace").splitlines()
    return [line for line in lines if any(word in line for word in _COMPLAINTS)]


def memory(server: harness.Server) -> float:
    """Resident memory of the server's processes, in MiB."""
    main = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in [main, *main.children(recursive=True)]) / 2**20
