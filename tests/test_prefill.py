"""Which pages a prefill chunk closes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_sparse.prefill import check_prefill, closing_token_indices, summarise_prefill

lengths = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=6)


@given(requests=lengths, page_size=st.sampled_from([16, 32, 64, 128]))
def test_closing_tokens_are_those_at_the_end_of_a_page(requests: list[tuple[int, int]], page_size: int) -> None:
    expected, start = [], 0
    for prefix, extend in requests:
        expected += [start + i for i in range(extend) if (prefix + i) % page_size == page_size - 1]
        start += extend
    assert closing_token_indices([p for p, _ in requests], [e for _, e in requests], page_size) == expected


class Backend:
    """Stands in for SGLang's prefill backend."""

    def __init__(self) -> None:
        self.token_to_kv_pool = SimpleNamespace(
            get_kv_buffer=lambda layer: (f"keys of layer {layer}", f"values of layer {layer}")
        )
        self.calls: list[str] = []

    def init_forward_metadata(self, forward_batch: object) -> None:
        self.calls.append("metadata")

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        self.calls.append("extend")
        return q


class Mode:
    def __init__(self, extend: bool) -> None:
        self.extend = extend

    def is_extend(self) -> bool:
        return self.extend


@pytest.fixture
def recorded() -> tuple[Backend, list]:
    updates: list = []
    backend = Backend()
    summaries = SimpleNamespace(
        update=lambda layer, keys, values, pages: updates.append((layer, keys, values, pages.tolist()))
    )
    summarise_prefill(backend, summaries, 16)
    return backend, updates


def test_what_has_to_come_before_a_chunk_comes_before_it() -> None:
    backend, calls = Backend(), []
    summarise_prefill(backend, SimpleNamespace(), 16, before_chunk=lambda: calls.append(list(backend.calls)))
    backend.init_forward_metadata(batch(True, [0], [3], [16, 17, 18]))
    assert calls == [[]]
    assert backend.calls == ["metadata"]


def batch(extend: bool, prefix: list[int], lens: list[int], slots: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=Mode(extend),
        extend_prefix_lens_cpu=prefix,
        extend_seq_lens_cpu=lens,
        out_cache_loc=torch.tensor(slots),
    )


def test_closed_pages_are_summarised_after_each_layer(recorded: tuple[Backend, list]) -> None:
    backend, updates = recorded
    # One request: 10 tokens cached in page 5, 30 new ones fill page 5 and page 9 and begin page 2.
    chunk = batch(True, [10], [30], [*range(90, 96), *range(144, 160), *range(32, 40)])
    backend.init_forward_metadata(chunk)
    assert updates == []
    assert backend.forward_extend("q", "k", "v", SimpleNamespace(layer_id=3), chunk) == "q"
    assert updates == [(3, "keys of layer 3", "values of layer 3", [5, 9])]
    assert backend.calls == ["metadata", "extend"]
    assert isinstance(backend, Backend)


def test_a_chunk_that_closes_nothing_after_one_that_did_summarises_nothing(recorded: tuple[Backend, list]) -> None:
    backend, updates = recorded
    backend.init_forward_metadata(batch(True, [0], [16], list(range(16, 32))))
    backend.init_forward_metadata(batch(True, [16], [3], [32, 33, 34]))
    backend.forward_extend("q", "k", "v", SimpleNamespace(layer_id=0), None)
    assert updates == []
    backend.init_forward_metadata(batch(False, [0], [16], list(range(16, 32))))
    backend.forward_extend("q", "k", "v", SimpleNamespace(layer_id=0), None)
    assert updates == []


def test_a_prefill_that_bypasses_the_backend_is_told(recorded: tuple[Backend, list]) -> None:
    backend, _ = recorded
    check_prefill(backend, 1)
    backend.init_forward_metadata(batch(True, [0], [16], list(range(16, 32))))
    with pytest.raises(RuntimeError, match="--disable-prefill-cuda-graph"):
        check_prefill(backend, 1)
    backend.forward_extend("q", "k", "v", SimpleNamespace(layer_id=0), None)
    check_prefill(backend, 1)
    backend.init_forward_metadata(batch(True, [16], [3], [32, 33, 34]))
    check_prefill(backend, 1)
