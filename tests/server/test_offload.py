"""A server whose KV cache is in host memory says what one says whose KV cache is not, with any number of slots."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harness import KV_ITEM_BYTES, assert_same_answers, command, environment, skip_unless_served

pytestmark = pytest.mark.server

FLAGS = (
    *("--sparse-decode", "--sparse-decode-min-context", "128", "--sparse-decode-window-tokens", "32"),
    *("--sparse-decode-gamma", "0.9", "--page-size", "32", "--chunked-prefill-size", "256"),
    *("--max-total-tokens", "4096"),
)
OFFLOAD = ("--sparse-decode-offload", "--sparse-decode-host-memory", "0.2")
FEW_SLOTS = f"{0.0005 * KV_ITEM_BYTES:.4f}GiB"
"""Of the same number on any device, and not a share of its memory."""
HOT_CACHES = {"no slots": ("0",), "few slots": (FEW_SLOTS,), "ample": ()}


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


def prompts() -> list[list[int]]:
    """Some on one prefix; together more than the pool holds."""
    shared = prompt(0, 700)
    made = [shared[: 300 + 100 * i] + prompt(10 + i, 40 + 17 * i) for i in range(4)]
    return made + [prompt(100 + i, 300 + 111 * i) for i in range(4)]


@pytest.fixture(scope="module")
def resident_answers(start_server: Any, random_llama: Path) -> list[dict[str, Any]]:
    server = start_server(random_llama, *FLAGS)
    return server.generate_many(prompts(), tokens=80, at_once=8, margins=True)


@pytest.mark.parametrize("hot", HOT_CACHES)
def test_same_tokens_with_any_hot_cache(
    hot: str, start_server: Any, random_llama: Path, resident_answers: list[dict[str, Any]]
) -> None:
    size = HOT_CACHES[hot]
    server = start_server(random_llama, *FLAGS, *OFFLOAD, *(("--sparse-decode-hot-cache", *size) if size else ()))
    server.generate(prompts()[3], 4)
    answers = server.generate_many(prompts(), tokens=80, at_once=8)
    assert_same_answers(answers, resident_answers)
    # The prefix is found although none of it needs to be on the GPU.
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 500
    info = server.idle_info()
    offload, check = info["offload"], info["self_check"]
    assert check["stale_pages"] == check["wrong_slots"] == 0
    assert offload["misses"] > 0
    assert offload["missed_bytes"] == offload["misses"] * 16 * 2 * 64 * KV_ITEM_BYTES
    if hot == "no slots":
        assert offload["hits"] == 0
        assert offload["direct"] == offload["misses"]
    elif hot == "ample":
        assert offload["direct"] == 0
        assert offload["hits"] > 5 * offload["misses"]
    else:
        assert min(offload["hits"], offload["direct"], offload["evictions"]) > 0


def test_float8_in_the_host_answers_alike_with_and_without_slots(
    start_server: Any, random_llama: Path, resident_answers: list[dict[str, Any]]
) -> None:
    """Decoding is exact: where a block is read from changes nothing. A miss reads half the bytes."""
    answers = []
    for size in ("0", FEW_SLOTS):
        server = start_server(
            random_llama,
            *(*FLAGS, *OFFLOAD, "--sparse-decode-host-dtype", "fp8_e4m3", "--sparse-decode-hot-cache", size),
        )
        answers.append([server.generate(each, 40)["output_ids"] for each in prompts()[:3]])
        info = server.idle_info()
        # The summaries are those of keys before they were rounded.
        assert info["self_check"]["stale_pages"] is None
        assert info["self_check"]["wrong_slots"] == 0
        assert info["offload"]["missed_bytes"] == info["offload"]["misses"] * 16 * 2 * 65
    assert info["offload"]["hits"] > 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--sparse-decode-host-memory", "2"),
            "--sparse-decode-host-memory has no effect without --sparse-decode-offload",
        ),
        (("--sparse-decode-offload", "--sparse-decode-rule", "all"), "--sparse-decode-rule all reads keys"),
        (("--sparse-decode-offload", "--sparse-decode-host-memory", "much"), "--sparse-decode-host-memory is 'much'"),
        (
            ("--sparse-decode-offload", "--sparse-decode-host-memory", "900000"),
            "--sparse-decode-host-memory asks for 900000.0 GiB, but ",
        ),
        (
            ("--sparse-decode-offload", "--sparse-decode-staging", "64"),
            "--sparse-decode-staging is 64, but a prefix may",
        ),
        (
            ("--sparse-decode-offload", "--sparse-decode-hot-cache", "900000"),
            "--sparse-decode-hot-cache asks for 900000.00 GiB, but ",
        ),
    ],
)
def test_bad_input_is_one_line_at_start(flags: tuple[str, ...], message: str, random_llama: Path) -> None:
    skip_unless_served(flags)
    done = subprocess.run(
        command(random_llama, "--sparse-decode", "--page-size", "32", *flags),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=240,
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("sglang-sparse: error: ")]
    assert len(lines) == 1, done.stderr[-3000:]
    assert message in lines[0]
