"""A server with split keys says what one says that keeps them as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from harness import KV_ITEM_BYTES, assert_same_answers
from test_smollm2 import document, question

pytestmark = pytest.mark.server

SPLIT = ("--sparse-decode-kv-format", "split")
SPARSE = ("--sparse-decode", "--sparse-decode-min-context", "512", "--sparse-decode-thumbnail-bits", "2")
# Chunks that end with a page, and requests whose last chunk does not.
CHUNKS = ("--chunked-prefill-size", "512")


@pytest.fixture(scope="module")
def tokens(smollm2: Path) -> list[int]:
    """2,000 of them."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(smollm2)(document(2400)).input_ids
    assert len(ids) > 2000
    return ids[:2000]


@pytest.fixture(scope="module")
def servers(start_server: Any, smollm2: Path) -> tuple[Any, Any]:
    """One that keeps keys as they are, and one that splits them."""
    flags = (*SPARSE, *CHUNKS)
    return start_server(smollm2, *flags), start_server(smollm2, *flags, *SPLIT)


@contextlib.contextmanager
def all_blocks(servers: tuple[Any, Any]) -> Iterator[None]:
    """Nothing but the format differs between the servers: where blocks are left out, a key that differs may change
    which, and so what is said."""
    for server in servers:
        server.flush()
        server.post("/sparse_decode", {"enabled": False}).raise_for_status()
    yield
    for server in servers:
        server.post("/sparse_decode", {"enabled": True}).raise_for_status()


def test_greedy_text_at_2000_tokens_and_on_reused_pages(servers: tuple[Any, Any], tokens: list[int]) -> None:
    plain, split = servers
    with all_blocks(servers):
        expected, first = (server.generate(tokens, 60, margins=True) for server in servers)
        assert first["meta_info"]["cached_tokens"] == 0
        # The same prompt once more: its pages are found, and prefill reads their keys as they are kept.
        again = split.generate(tokens, 4)
        assert again["meta_info"]["cached_tokens"] == 1984
        # A page that decode steps filled is found too.
        whole = tokens + first["output_ids"][:56]
        longer = split.generate(whole, 4)
        assert longer["meta_info"]["cached_tokens"] == 2048
        assert_same_answers(
            [first, again, longer, split.generate(tokens[:63], 16)],
            [
                expected,
                *(plain.generate(*asked, margins=True) for asked in ((tokens, 4), (whole, 4), (tokens[:63], 16))),
            ],
        )
    check = split.idle_info()["self_check"]
    assert check["live_closed_pages"] >= 2000 // 64
    assert check["stale_pages"] == 0


def test_several_requests_at_once(servers: tuple[Any, Any], tokens: list[int]) -> None:
    """Each has its own row of open pages; some begin on pages that others closed."""
    prompts = [tokens[:length] for length in (1400, 700, 1411, 64, 190)]
    with all_blocks(servers):
        expected, got = (server.generate_many(prompts, tokens=40, at_once=5, margins=True) for server in servers)
        plain, split = (
            requests.get(f"{server.url}/sparse_decode", timeout=60).json()["since_change"] for server in servers
        )
    assert_same_answers(got, expected)
    # All blocks, and no page is scanned to find them; split ones have fewer bytes.
    assert plain["kept_fraction"] == split["kept_fraction"] == plain["bytes_read_fraction"] == 1
    # Bytes a channel of a key: residual, code, and a block's share of low and step.
    key = 1 + 2 / 8 + 4 / 16
    assert split["bytes_read_fraction"] == pytest.approx((key + KV_ITEM_BYTES) / (2 * KV_ITEM_BYTES))
    check = servers[1].idle_info()["self_check"]
    assert check["stale_pages"] == 0
    assert check["free_tokens"] + check["cached_tokens"] == check["total_tokens"]


def test_sparse_decode_finds_a_fact_and_reads_fewer_bytes(servers: tuple[Any, Any]) -> None:
    for server in servers:
        assert "1968" in server.generate(question("Cedar"), 8)["text"]
    plain, split = (server.idle_info() for server in servers)
    assert split["self_check"]["stale_pages"] == 0
    assert 0 < split["kept_fraction"] < 1
    # A block has fewer bytes than in the model's dtype.
    assert split["bytes_read_fraction"] < plain["bytes_read_fraction"]


def test_top_delta_over_split_keys_finds_a_fact(start_server: Any, smollm2: Path) -> None:
    """Kept blocks are found by the codes, and by the largest score of sinks and window as they are kept."""
    server = start_server(smollm2, *SPARSE, *CHUNKS, *SPLIT, "--sparse-decode-rule", "top-delta")
    assert "1968" in server.generate(question("Cedar"), 8)["text"]
    info = server.idle_info()
    assert info["self_check"]["stale_pages"] == 0
    assert info["options"]["rule"] == "top-delta"
    assert 0 < info["kept_fraction"] < 1
