"""Summaries and step buffers come out of SGLang's KV budget."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sparse_kernels import AttentionWorkspace, SelectionTap

from sglang_sparse import memory, paths
from sglang_sparse.buffers import DecodeBuffers
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import ESTIMATORS, SparseDecodeOptions
from sglang_sparse.selection import make_estimator
from sglang_sparse.summaries import PageSummaries
from sglang_sparse.tail import MeanTail, make_tail

GEOMETRY = Geometry(kv_heads=8, group_size=4, head_dim=128, dtype=torch.bfloat16, page_size=64, block_size=16)
LAYERS = 32
KV_BYTES = GEOMETRY.kv_bytes * GEOMETRY.kv_heads * LAYERS


class Inner:
    """SGLang's configurator for a plain model: tokens are bytes ÷ bytes per token."""

    marker = "inner"

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> SimpleNamespace:
        return SimpleNamespace(max_total_num_tokens=available_bytes // KV_BYTES // page_size * page_size)


def reserve(options: SparseDecodeOptions):
    return memory.reserve(Inner(), options, geometry=GEOMETRY, layers=LAYERS, max_pages=2048, max_requests=64)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dense_layers", [(), (0, 1)])
@pytest.mark.parametrize("budget", [5 << 30, 100 << 30])
def test_pool_summaries_and_buffers_fit_the_budget(estimator: str, dense_layers: tuple, budget: int) -> None:
    options = SparseDecodeOptions(estimator=estimator, dense_layers=dense_layers, rule="top-k", top_k=8)
    tokens = reserve(options).calculate_pool_sizes(budget, 64).max_total_num_tokens
    pages = tokens // 64 + 1
    summary = make_estimator(options, GEOMETRY).allocate(pages, "meta")
    summaries = sum(tensor.nbytes for tensor in summary) * (LAYERS - len(dense_layers))
    tail = make_tail(options, GEOMETRY)
    if tail:
        summaries += tail.allocate(pages, "meta").nbytes * (LAYERS - len(dense_layers))
    assert (tail is not None) == (estimator in ("thumbnail", "exact"))
    buffers = DecodeBuffers(
        GEOMETRY,
        max_requests=64,
        max_pages=2048,
        thresholds=[[0.95] * GEOMETRY.kv_heads] * LAYERS,
        selects=True,
        has_tail=tail is not None,
        device="meta",
    )
    used = tokens * KV_BYTES + summaries + buffers.bytes
    assert used <= budget + (64 << 20)
    assert used >= budget * 0.99 - memory.MAX_STEP_BYTES


def test_the_audit_is_reserved_unless_it_is_off() -> None:
    budget = 5 << 30
    tokens = [
        reserve(SparseDecodeOptions(audit_rate=rate)).calculate_pool_sizes(budget, 64).max_total_num_tokens
        for rate in (0, 0.001)
    ]
    made = SelectionTap.create(
        kv_heads=8, group_size=4, head_dim=128, capacity=2048 * 4, dtype=torch.bfloat16, device="meta"
    )
    mass = 8 * 4 * 2048 * 4 * 4
    assert made.bytes + mass < memory.audit_bytes(GEOMETRY, 2048) < 16 << 20
    assert 0 <= tokens[0] - tokens[1] <= memory.audit_bytes(GEOMETRY, 2048) // KV_BYTES + 64


@pytest.mark.parametrize("path", ["lists", "fused"])
def test_the_kernels_workspaces_are_reserved(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are MiB for each path, by its multiprocessors."""
    options = SparseDecodeOptions(rule="top-delta", path=path, audit_rate=0)
    reserved = memory.workspace_bytes(options, GEOMETRY, 64, "cpu")
    sizes = {"layers": LAYERS, "max_pages": 2048, "max_requests": 64}
    with monkeypatch.context() as patch:
        patch.setattr(memory, "workspace_bytes", lambda *_: 0)
        without = memory.step_buffer_bytes(options, GEOMETRY, **sizes)
    assert memory.step_buffer_bytes(options, GEOMETRY, **sizes) == without + reserved
    attention = AttentionWorkspace.create(None, 4, 128, "cpu").nbytes
    assert (reserved > attention) == (path == "fused")
    assert reserved >= attention == 2 * 4 * (128 + 2) * 4


@pytest.mark.parametrize(
    ("path", "bits", "most", "rows"),
    [("lists", 2, 0, 0), ("auto", 2, 2, 4), ("auto", 3, 0, 0), ("auto", 4, 1, 1), ("fused", 3, 3, 64)],
)
def test_what_rows_kept_before_is_reserved_where_batches_take_the_fused_pass(
    path: str, bits: int, most: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`most`: of up to three requests; `rows`: of up to 64."""
    monkeypatch.setattr(paths, "fused_rows_are_aligned", lambda *_, **__: True)
    options = SparseDecodeOptions(rule="top-delta", path=path, thumbnail_bits=bits)
    chosen = paths.Paths.of(options, GEOMETRY, "meta")
    assert chosen.most_fused(3) == most
    assert chosen.most_fused(64) == rows
    made = [
        DecodeBuffers(
            GEOMETRY,
            max_requests=64,
            max_pages=2048,
            thresholds=[[6.0] * GEOMETRY.kv_heads] * LAYERS,
            selects=True,
            has_tail=True,
            lists=chosen.ever_lists,
            fused_requests=requests,
            device="meta",
        ).bytes
        for requests in (0, rows)
    ]
    held = rows * LAYERS * GEOMETRY.kv_heads * 4
    assert made[1] - made[0] == held
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "workspace_bytes", lambda *_: 0)
        sizes = {"layers": LAYERS, "max_pages": 2048, "max_requests": 64}
        reserved = memory.step_buffer_bytes(options, GEOMETRY, **sizes)
        patch.setattr(paths.Paths, "most_fused", lambda *_: 0)
        assert reserved - memory.step_buffer_bytes(options, GEOMETRY, **sizes) == held


def test_rule_all_reserves_nothing() -> None:
    inner = Inner()
    options = SparseDecodeOptions(rule="all")
    assert memory.reserve(inner, options, geometry=GEOMETRY, layers=LAYERS, max_pages=2048, max_requests=64) is inner


def test_too_little_memory_leaves_none_for_the_pool() -> None:
    assert reserve(SparseDecodeOptions()).calculate_pool_sizes(1 << 20, 64).max_total_num_tokens == 0


def test_other_attributes_are_the_inner_configurators() -> None:
    assert reserve(SparseDecodeOptions()).marker == "inner"


over_buffers = pytest.mark.parametrize(("has_tail", "has_maxima"), [(False, False), (True, False), (True, True)])


@over_buffers
def test_a_turn_holds_what_fits_and_at_least_one_request(has_tail: bool, has_maxima: bool) -> None:
    per_request = memory.step_bytes_per_request(GEOMETRY, 2048, has_tail, has_maxima)
    turn = memory.requests_per_turn(GEOMETRY, 2048, 10_000, has_tail, has_maxima)
    assert turn * per_request <= memory.MAX_STEP_BYTES < (turn + 1) * per_request
    assert memory.requests_per_turn(GEOMETRY, 2048, 3, has_tail, has_maxima) == 3
    assert memory.requests_per_turn(GEOMETRY, 10_000_000, 3, has_tail, has_maxima) == 1


@over_buffers
def test_step_bytes_are_what_is_allocated(has_tail: bool, has_maxima: bool) -> None:
    thresholds = [[0.95] * GEOMETRY.kv_heads]
    arguments = {
        "max_pages": 2048,
        "thresholds": thresholds,
        "selects": True,
        "has_tail": has_tail,
        "has_maxima": has_maxima,
        "device": "meta",
    }
    one, two = (DecodeBuffers(GEOMETRY, max_requests=count, **arguments) for count in (1, 2))
    # A row of the page table, length, closing page, thresholds, counts and totals belong to no turn.
    rest = 2048 * 4 + 2 * 4 + 2 * GEOMETRY.kv_heads * 4 + 2 * 8
    assert two.bytes - one.bytes - rest == memory.step_bytes_per_request(GEOMETRY, 2048, has_tail, has_maxima)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_summary_bytes_are_what_is_allocated(estimator: str) -> None:
    made = make_estimator(SparseDecodeOptions(estimator=estimator, rule="top-k", top_k=8), GEOMETRY)
    for tail in (None, MeanTail(GEOMETRY)):
        summaries = PageSummaries(made, [0, 1], 100, "meta", tail)
        per_token = made.summary_bytes() + (tail.summary_bytes() if tail else 0)
        assert summaries.bytes == pytest.approx(per_token * GEOMETRY.kv_heads * 100 * 64 * 2)
