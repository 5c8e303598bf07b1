"""Sizes as SGLang asks for them: from the GPU's budget, then cut to a number of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from sglang_sparse.geometry import Geometry
from sglang_sparse.offload import budget
from sglang_sparse.offload.budget import OffloadPoolConfigurator
from sglang_sparse.offload.limits import MemoryLimit
from sglang_sparse.options import SparseDecodeOptions

GIB = 1 << 30
GEOMETRY = Geometry(kv_heads=8, group_size=4, head_dim=128, dtype=torch.bfloat16, page_size=64, block_size=16)


class Inner:
    """SGLang's configurator, as far as it is asked."""

    other = "its own"

    def calculate_pool_sizes_from_max_tokens(self, tokens: int, page_size: int) -> Any:
        assert page_size == 64
        return SimpleNamespace(max_total_num_tokens=tokens)


class StoppedError(Exception):
    pass


def stop(error: BaseException) -> NoReturn:
    raise StoppedError(str(error))


def make(monkeypatch: pytest.MonkeyPatch, **options: Any) -> OffloadPoolConfigurator:
    monkeypatch.setattr(budget, "host_limit", lambda: MemoryLimit("the cgroup's memory limit", 100 * GIB, 70 * GIB))
    return OffloadPoolConfigurator(
        Inner(),
        SparseDecodeOptions(offload=True, **options),
        geometry=GEOMETRY,
        layers=32,
        context=512 * 64 - 1000,
        max_pages=512,
        max_requests=16,
        on_error=stop,
    )


def test_the_hosts_tokens_are_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = make(monkeypatch, host_memory="64", hot_cache="0.5")
    config = pools.calculate_pool_sizes(40 * GIB, 64)
    assert config.max_total_num_tokens == 4 * 131072 - 64
    assert pools.sizes is not None
    assert pools.sizes.hot_bytes == pytest.approx(20 * GIB, rel=0.03)
    assert pools.sizes.staging_tokens == 512 * 64 - 1000
    assert pools.other == "its own"
    # `--max-total-tokens`, and what SGLang's constraints leave.
    assert pools.calculate_pool_sizes_from_max_tokens(64_000, 64).max_total_num_tokens == 64_000
    assert pools.sizes.host_pages == 1001
    assert pools.sizes_for(6400).host_pages == 101


def test_the_default_takes_most_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.8 of the limit would be more than what is left of it; without any the server would be ended."""
    pools = make(monkeypatch)
    pools.calculate_pool_sizes(60 * GIB, 64)
    assert pools.sizes is not None
    assert 62.9 * GIB < pools.sizes.host_bytes <= 63 * GIB


def test_staging_of_the_context_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have room for some pages more, which no prefix fills."""
    pools = make(monkeypatch, staging=512 * 64 - 1000)
    pools.calculate_pool_sizes(60 * GIB, 64)
    assert pools.sizes is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"host_memory": "0.8"},
            r"--sparse-decode-host-memory asks for 80.0 GiB, but the cgroup's memory limit of 100.0",
        ),
        ({"staging": 100}, "--sparse-decode-staging is 100, but a prefix may have up to 31768 tokens"),
        ({"host_memory": "1", "hot_cache": "50"}, "--sparse-decode-hot-cache asks for 50.00 GiB"),
    ],
)
def test_errors_end_the_start_in_one_line(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoppedError, match=message):
        make(monkeypatch, **options).calculate_pool_sizes(30 * GIB, 64)
