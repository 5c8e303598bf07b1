"""Whatever happens to requests, pages return to the pool and every live page's summary is right."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

pytestmark = pytest.mark.server

# Small pages and chunks, and a pool that holds about two of the longest requests: pages are evicted and reused.
FLAGS = (
    "--sparse-decode",
    "--sparse-decode-min-context",
    "128",
    "--sparse-decode-window-tokens",
    "32",
    "--page-size",
    "32",
    "--chunked-prefill-size",
    "256",
    "--max-total-tokens",
    "4096",
    "--decode-log-interval",
    "10",
)


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


OFFLOAD = (
    "--sparse-decode-offload",
    "--sparse-decode-host-memory",
    "0.2",
    # A few slots a layer and KV head.
    "--sparse-decode-hot-cache",
    "0.0002",
)


SPLIT = ("--sparse-decode-kv-format", "split")


@pytest.fixture(scope="module", params=[(), OFFLOAD, SPLIT], ids=["resident", "offloaded", "split"])
def server(request: pytest.FixtureRequest, start_server: Any, random_llama: Path) -> Any:
    return start_server(random_llama, *FLAGS, *request.param)


def assert_no_trace(server: Any) -> dict[str, Any]:
    """The idle server's pools are complete, and live summaries equal recomputed ones."""
    info = server.idle_info()
    check = info["self_check"]
    assert check["free_tokens"] + check["cached_tokens"] == check["total_tokens"], server.tail()
    assert check["stale_pages"] == 0, server.tail()
    assert check["wrong_slots"] == 0, server.tail()
    return info


def test_summaries_survive_prefill_decode_prefix_hits_eviction_and_reuse(server: Any) -> None:
    shared = prompt(0, 700)
    cached = 0
    for round_number in range(4):
        prompts = [shared[: 600 + 30 * i] + prompt(10 * round_number + i, 40 + 17 * i) for i in range(4)]
        prompts += [prompt(100 + 10 * round_number + i, 300 + 111 * i) for i in range(4)]
        answers = server.generate_many(prompts, tokens=70, at_once=8)
        cached += sum(answer["meta_info"]["cached_tokens"] for answer in answers)
        info = assert_no_trace(server)
        assert info["self_check"]["live_closed_pages"] > 20
    assert cached > 0, "no prefix was shared"
    assert info["steps"] > 100
    # A byte of residual, codes and the page's bounds in the place of four bytes of a key.
    block_share = (1 + 0.25 + 4 / 16 + 4) / 8 if info["options"]["kv_format"] == "split" else 1
    assert 0 < info["kept_fraction"] * block_share < info["bytes_read_fraction"] < 1.2


def test_summaries_are_right_while_requests_run(server: Any) -> None:
    checks: list[dict[str, Any]] = []

    def seen_running() -> bool:
        return any(check["free_requests"] < check["total_requests"] for check in checks)

    # On a busy machine requests may be over before a check has come through.
    for attempt in range(5):
        with ThreadPoolExecutor(3) as pool:
            seed = 200 + 3 * attempt
            running = [pool.submit(server.generate, prompt(seed + i, 150 + 50 * i), 150) for i in range(3)]
            while not all(request.done() for request in running):
                checks.append(server.sparse_info()["self_check"])
                time.sleep(0.2)
            for request in running:
                request.result()
        if seen_running():
            break
    assert seen_running(), "never checked a running request"
    assert all(check["stale_pages"] == check["wrong_slots"] == 0 for check in checks)
    assert_no_trace(server)


def test_requests_longer_than_the_context_are_refused_and_leave_no_trace(server: Any) -> None:
    response = server.post("/generate", {"input_ids": prompt(1, 5000), "sampling_params": {"max_new_tokens": 4}})
    assert response.status_code == 400
    assert "5000" in response.text
    assert_no_trace(server)


@pytest.mark.parametrize("spare", [7, 31, 33, 63])
def test_prompts_that_nearly_fill_the_pool_are_refused_and_hold_nobody_up(server: Any, spare: int) -> None:
    body = {"input_ids": prompt(2, 4096 - spare), "sampling_params": {"max_new_tokens": 1}}
    response = server.post("/generate", body)
    assert response.status_code == 400
    assert len(server.generate(prompt(3, 10), 2)["output_ids"]) == 2
    assert_no_trace(server)


def test_the_longest_prompt_that_is_taken_is_served(server: Any) -> None:
    # SGLang admits a prompt with room for a page and a token beside it; the prompt's own last page is counted as full.
    answer = server.generate(prompt(4, 4096 - 2 * 32), 8)
    assert answer["meta_info"]["completion_tokens"] == 8
    assert_no_trace(server)


def test_disconnected_streams_leave_no_trace(server: Any) -> None:
    for seed in range(3):
        body = {
            "input_ids": prompt(300 + seed, 400),
            "stream": True,
            "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True},
        }
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=60) as response:
            received = response.iter_lines()
            for _ in range(6):
                next(received)
    assert_no_trace(server)


def test_aborted_requests_leave_no_trace(server: Any) -> None:
    def stream(rid: str) -> None:
        body = {
            "input_ids": prompt(400, 500),
            "rid": rid,
            "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
        }
        server.post("/generate", body)

    with ThreadPoolExecutor(2) as pool:
        requests_running = [pool.submit(stream, f"abort-{i}") for i in range(2)]
        time.sleep(2)
        for i in range(2):
            server.post("/abort_request", {"rid": f"abort-{i}"}).raise_for_status()
        for request in requests_running:
            request.result(timeout=60)
    assert_no_trace(server)


def test_requests_that_do_not_fit_together_are_retracted_and_finish(server: Any) -> None:
    """Eight requests that grow beyond the pool: SGLang retracts some and computes them again."""
    prompts = [prompt(500 + i, 200) for i in range(8)]
    answers = server.generate_many(prompts, tokens=500, at_once=8)
    assert all(answer["meta_info"]["completion_tokens"] == 500 for answer in answers)
    assert_no_trace(server)


def test_flushing_the_cache_frees_every_page(server: Any) -> None:
    server.generate(prompt(600, 300), 8)
    server.idle_info()
    server.flush()
    check = server.sparse_info()["self_check"]
    assert check["free_tokens"] == check["total_tokens"]
    assert check["live_closed_pages"] == 0


def test_log_line_follows_sglangs_decode_line(server: Any) -> None:
    server.generate(prompt(700, 300), 60)
    lines = [line for line in server.log.read_text().splitlines() if "Sparse decode, #steps" in line]
    assert lines, server.tail()
    assert "kept: " in lines[-1]
    assert "bytes read: " in lines[-1]


def test_counters_are_per_layer_and_head(server: Any) -> None:
    server.generate(prompt(800, 600), 20)
    table = server.sparse_info()["kept_fraction_by_layer_and_head"]
    assert len(table) == 2
    assert all(len(row) == 2 for row in table)
    assert all(0 < share <= 1 for row in table for share in row)
