"""A scheduler that is killed in the middle of a decode step takes its whole server with it, and holds nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import harness
import psutil
import pytest
import requests
from random_model import write_random_model

pytestmark = pytest.mark.server

FLAGS = ("--sparse-decode", "--sparse-decode-min-context", "64", "--page-size", "32", "--max-total-tokens", "4096")
OFFLOAD = (
    *("--sparse-decode-offload", "--sparse-decode-host-memory", "0.2"),
    *("--sparse-decode-hot-cache", "0.001"),
)
LEFT_BY_SGLANG = ("sem.mp-", "sglang_loads_")
"""SGLang's own files in shared memory, 16 KiB a server, outlast any of its servers; so do semaphores of killed ones."""
SECONDS = 30
"""In which SGLang notices and ends."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


def shared_files(processes: list[psutil.Process]) -> set[str]:
    """Files in shared memory that the processes have mapped."""
    mapped = {part.path for process in processes for part in process.memory_maps(grouped=True)}
    return {path for path in mapped if path.startswith("/dev/shm/")}


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def scheduler_of(processes: list[psutil.Process]) -> psutil.Process:
    found = [process for process in processes if any("sglang::scheduler" in part for part in process.cmdline())]
    assert len(found) == 1, [process.cmdline() for process in processes]
    return found[0]


@pytest.mark.parametrize("flags", [(), OFFLOAD], ids=["resident", "offloaded"])
def test_a_server_ends_with_its_scheduler_and_leaves_nothing(
    model: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    harness.skip_unless_served(flags)
    with harness.Server(model, *FLAGS, *flags, log=tmp_path / "server.log") as server:
        main = psutil.Process(server.process.pid)
        processes = [main, *main.children(recursive=True)]
        shared = shared_files(processes)
        _kill_in_a_stream(server, scheduler_of(processes))
        assert server.process.wait(SECONDS) != 0, server.tail()
    deadline = time.monotonic() + SECONDS
    while not all(is_gone(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [process for process in processes if not is_gone(process)] == []
    assert shared, "even SGLang's own files were not seen"
    ours = {path for path in shared if not Path(path).name.startswith(LEFT_BY_SGLANG)}
    assert [path for path in ours if Path(path).exists()] == []
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{server.url}/health", timeout=5)


def _kill_in_a_stream(server: Any, scheduler: psutil.Process) -> None:
    body = {
        "input_ids": [i % 256 for i in range(500)],
        "stream": True,
        "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
    }
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=SECONDS) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        # What it holds of host memory is its own and anonymous: it goes with the process.
        scheduler.kill()
        rest = []
        with pytest.raises(requests.RequestException):
            rest.extend(lines)
    assert b"data: [DONE]" not in rest
