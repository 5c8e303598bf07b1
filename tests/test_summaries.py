"""Page summaries: updates reach the right pages, and stale ones are told."""

from __future__ import annotations

import pytest
import torch

from sglang_sparse.geometry import Geometry
from sglang_sparse.options import ESTIMATORS, SparseDecodeOptions
from sglang_sparse.selection import make_estimator
from sglang_sparse.summaries import PageSummaries

GEOMETRY = Geometry(kv_heads=2, group_size=3, head_dim=64, dtype=torch.float32, page_size=32, block_size=16)
PAGES = 7
WITH_SUMMARY = [name for name in ESTIMATORS if name != "exact"]


@pytest.fixture(params=WITH_SUMMARY)
def summaries(request: pytest.FixtureRequest) -> PageSummaries:
    estimator = make_estimator(SparseDecodeOptions(estimator=request.param), GEOMETRY)
    return PageSummaries(estimator, [0, 2], PAGES, "cpu")


def keys() -> torch.Tensor:
    return torch.randn(PAGES * 32, 2, 64, generator=torch.Generator().manual_seed(3))


def test_only_the_given_pages_are_written(summaries: PageSummaries) -> None:
    summaries.update(0, keys(), torch.tensor([5, -1, 2], dtype=torch.int32))
    for tensor in summaries[0]:
        written = tensor.view(torch.uint8).flatten(1).any(1)
        assert written.tolist() == [False, False, True, False, False, True, False]


def test_layers_are_independent_and_dense_layers_have_none(summaries: PageSummaries) -> None:
    pages = torch.tensor([1], dtype=torch.int32)
    summaries.update(2, keys(), pages)
    summaries.update(1, keys(), pages)
    assert 1 not in summaries
    assert not any(tensor.view(torch.uint8).any() for tensor in summaries[0])


def test_a_changed_key_makes_its_page_stale(summaries: PageSummaries) -> None:
    pool, pages = keys(), torch.tensor([1, 3, 6])
    summaries.update(0, pool, pages)
    assert summaries.stale_pages(0, pool, pages) == 0
    pool[3 * 32 + 7] += 1.0
    assert summaries.stale_pages(0, pool, pages) == 1
    assert summaries.stale_pages(0, pool, torch.tensor([1, 6])) == 0
    assert summaries.stale_pages(0, pool, torch.tensor([], dtype=torch.int64)) == 0
