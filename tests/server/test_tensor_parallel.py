"""Two tensor-parallel ranks over gloo: they answer as one does, and what they say of themselves is of all heads.

The ranks share a CPU, so that servers are started one at a time.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import requests

from sglang_sparse import sglang_compat

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(harness.ON_CUDA, reason="two CPU ranks"),
    pytest.mark.skipif(not sglang_compat.has_tested_ranks(), reason="tensor parallelism is refused on this release"),
]

TOKENS = 16
MARGIN = 1e-3
"""Nats by which the best token leads the second where one and two ranks may answer differently."""
BY_HEAD = [[0.2, 1.0], [0.9, 0.3]]
SPARSE = ("--sparse-decode", "--sparse-decode-audit-rate", "1", "--page-size", "32", "--chunked-prefill-size", "256")
SMALL = {"min_context": 128, "sink_tokens": 0, "window_tokens": 16}


def two_ranks() -> dict[str, str]:
    """What SGLang asks for where ranks outnumber NUMA nodes: each rank's cores."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}


def prompts() -> list[list[int]]:
    """Some alone, and two that go on from one document at and off a page border."""
    generator = random.Random(7)
    drawn = [[generator.randrange(256) for _ in range(length)] for length in (60, 300, 700, 1100)]
    document = drawn[-1]
    return [*drawn, document[:640] + drawn[0], document[:777] + drawn[0][::-1]]


def answer(server: Any, prompt: list[int], **sampling: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, **sampling}
    response = server.post(
        "/generate",
        {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2},
    )
    response.raise_for_status()
    return response.json()


def assert_same(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    """Token for token, up to a place where rounding decides."""
    pairs = zip(ours["output_ids"], reference["output_ids"], strict=True)
    different = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if different is not None:
        best, second = reference["meta_info"]["output_top_logprobs"][different][:2]
        assert best[0] - second[0] < MARGIN, f"token {different} of {len(ours['output_ids'])}"


def change(server: Any, **settings: Any) -> None:
    """Changes settings; what is read from here on is counted anew."""
    server.post("/sparse_decode", settings).raise_for_status()


def since_change(server: Any) -> dict[str, Any]:
    response = requests.get(f"{server.url}/sparse_decode", timeout=60)
    response.raise_for_status()
    return response.json()["since_change"]


def measured(server: Any, **sampling: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Answers to all prompts, one after the other on an empty cache, and what was read for them."""
    server.flush()
    change(server, enabled=True)
    answers = [answer(server, prompt, **sampling) for prompt in prompts()]
    return answers, since_change(server)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("config") / "by_head.json"
    file.write_text(json.dumps({**SMALL, "gamma_by_head": BY_HEAD}))
    return str(file)


@pytest.fixture(scope="module")
def one_rank(random_llama: Path, config: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank answers, sparsely and with every block, and what it read."""
    log = tmp_path_factory.mktemp("one") / "log"
    with harness.Server(random_llama, *SPARSE, "--sparse-decode-config", config, log=log) as server:
        sparse, read = measured(server)
        return {"sparse": sparse, "read": read, "info": server.idle_info(), "gamma": measured(server, **asks(0.5))}


@pytest.fixture(scope="module")
def server(
    one_rank: dict[str, Any], random_llama: Path, config: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    log = tmp_path_factory.mktemp("two") / "log"
    flags = (*SPARSE, "--sparse-decode-config", config, "--tp-size", "2", "--enable-metrics")
    with harness.Server(random_llama, *flags, log=log, **two_ranks()) as server:
        yield server


def asks(gamma: float) -> dict[str, Any]:
    return {"custom_params": {"sparse_decode": {"gamma": gamma}}}


def test_two_ranks_answer_and_read_as_one(server: Any, one_rank: dict[str, Any]) -> None:
    answers, read = measured(server)
    for ours, reference in zip(answers, one_rank["sparse"], strict=True):
        assert_same(ours, reference)
    assert sum(each["meta_info"]["cached_tokens"] for each in answers) >= 640 + 768
    # Under overlap scheduling a step may follow a request's last one.
    least = len(answers) * (TOKENS - 1)
    assert least <= read["steps"] <= least + len(answers)
    heads = read["kept_fraction_by_layer_and_head"]
    for ours, reference in zip(heads, one_rank["read"]["kept_fraction_by_layer_and_head"], strict=True):
        assert ours == pytest.approx(reference, abs=0.01)
    # Each rank has one of the two heads, and the gammas that the config has for it.
    assert heads[0][1] == 1
    assert heads[0][0] < heads[1][0] < 1
    assert heads[1][1] < heads[1][0]
    for name in ("kept_fraction", "bytes_read_fraction"):
        assert read[name] == pytest.approx(one_rank["read"][name], abs=0.01)


def test_a_gamma_of_the_requests_own_reaches_both_ranks(server: Any, one_rank: dict[str, Any]) -> None:
    references, one_read = one_rank["gamma"]
    answers, read = measured(server, **asks(0.5))
    for ours, reference in zip(answers, references, strict=True):
        assert_same(ours, reference)
    for ours, reference in zip(
        read["kept_fraction_by_layer_and_head"], one_read["kept_fraction_by_layer_and_head"], strict=True
    ):
        assert max(ours) < 0.95
        assert ours == pytest.approx(reference, abs=0.01)


def test_a_change_reaches_both_ranks(server: Any) -> None:
    prompt = prompts()[2]
    try:
        change(server, gamma=1)
        answer(server, prompt)
        assert since_change(server)["kept_fraction_by_layer_and_head"] == [[1, 1], [1, 1]]
        change(server, gamma=0.3)
        answer(server, prompt)
        kept = since_change(server)["kept_fraction_by_layer_and_head"]
        assert all(0 < head < 0.8 for layer in kept for head in layer)
    finally:
        change(server, gamma=None)


def test_what_the_server_says_of_itself_is_of_all_heads(server: Any, one_rank: dict[str, Any]) -> None:
    answered = answer(server, prompts()[2])
    usage = answered["meta_info"]["sparse_decode"]
    # Two layers, one of two heads, 44 or 45 blocks of 16 tokens.
    assert (usage["tp_rank"], usage["tp_size"]) == (0, 2)
    assert usage["blocks"] == 2 * sum(-(-length // 16) for length in range(701, 700 + TOKENS))

    info, alone = server.idle_info(), one_rank["info"]
    assert info["tp_size"] == 2
    assert alone["tp_size"] == 1
    assert info["options"] == alone["options"]
    assert info.keys() == alone.keys()
    assert info["summary_bytes"] == alone["summary_bytes"]
    assert [len(heads) for heads in info["kept_fraction_by_layer_and_head"]] == [2, 2]
    check = info["self_check"]
    assert check["live_closed_pages"] > 0
    assert (check["stale_pages"], check["wrong_slots"]) == (0, 0)
    # A sample has a value for each of the heads.
    audit = info["audit"]
    assert sum(layer["count"] for layer in audit["by_layer"].values()) == 2 * audit["samples"] > 0
    for layer, gammas in zip(("0", "1"), BY_HEAD, strict=True):
        assert audit["by_layer"][layer]["mean"] == pytest.approx(sum(gammas) / 2, abs=0.15)


def test_metrics_have_the_heads_of_each_rank(server: Any) -> None:
    info = server.idle_info()
    text = requests.get(f"{server.url}/metrics", timeout=60).text

    def by_rank(name: str) -> dict[str, float]:
        found = re.findall(rf'^sglang_sparse_{name}\{{.*\btp_rank="(\d)".*\}} (\S+)$', text, re.MULTILINE)
        totals: dict[str, float] = {}
        for rank, value in found:
            totals[rank] = totals.get(rank, 0.0) + float(value)
        return totals

    kept, all_bytes = by_rank("kept_bytes_total"), by_rank("kv_bytes_total")
    assert kept.keys() == all_bytes.keys() == {"0", "1"}
    # A token has key and value of 64 fp32 channels in two layers and two heads.
    assert sum(all_bytes.values()) == info["tokens"] * 2 * 64 * 4 * 2 * 2
    assert sum(kept.values()) / sum(all_bytes.values()) == pytest.approx(info["kept_fraction"], abs=0.01)
    assert by_rank("steps_total") == {"0": info["steps"]}
    assert sum(by_rank("summary_bytes").values()) == info["summary_bytes"]


def test_both_ranks_without_sparse_decode_answer_as_with_every_block(
    server: Any, random_llama: Path, tmp_path: Path
) -> None:
    try:
        change(server, gamma=1)
        server.flush()
        every_block = [answer(server, prompt) for prompt in prompts()]
    finally:
        change(server, gamma=None)
    flags = ("--chunked-prefill-size", "256", "--tp-size", "2")
    with harness.Server(random_llama, *flags, log=tmp_path / "log", **two_ranks()) as dense:
        for ours, prompt in zip(every_block, prompts(), strict=True):
            assert_same(ours, answer(dense, prompt))
