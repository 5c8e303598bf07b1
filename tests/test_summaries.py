"""Page summaries: updates reach the right pages, and stale ones are told."""

from __future__ import annotations

import pytest
import torch

from sglang_sparse.geometry import Geometry
from sglang_sparse.options import ESTIMATORS, SparseDecodeOptions
from sglang_sparse.selection import make_estimator
from sglang_sparse.summaries import PageSummaries
from sglang_sparse.tail import MeanTail

GEOMETRY = Geometry(kv_heads=2, group_size=3, head_dim=64, dtype=torch.float32, page_size=32, block_size=16)
PAGES = 7
WITH_SUMMARY = [(name, None) for name in ESTIMATORS if name != "exact"]
WITH_SUMMARY += [("thumbnail", MeanTail(GEOMETRY)), ("exact", MeanTail(GEOMETRY))]


@pytest.fixture(params=WITH_SUMMARY, ids=lambda param: param[0] + "-tail" * bool(param[1]))
def summaries(request: pytest.FixtureRequest) -> PageSummaries:
    name, tail = request.param
    return PageSummaries(
        make_estimator(SparseDecodeOptions(estimator=name, rule="top-k", top_k=8), GEOMETRY), [0, 2], PAGES, "cpu", tail
    )


def pools() -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, PAGES * 32, 2, 64, generator=torch.Generator().manual_seed(3))
    return keys, values


def tensors(summaries: PageSummaries, layer: int) -> list[torch.Tensor]:
    return [*summaries[layer], *([summaries.value_means(layer)] if summaries.has_tail else [])]


def test_only_the_given_pages_are_written(summaries: PageSummaries) -> None:
    summaries.update(0, *pools(), torch.tensor([5, -1, 2], dtype=torch.int32))
    for tensor in tensors(summaries, 0):
        written = tensor.view(torch.uint8).flatten(1).any(1)
        assert written.tolist() == [False, False, True, False, False, True, False]


def test_layers_are_independent_and_dense_layers_have_none(summaries: PageSummaries) -> None:
    pages = torch.tensor([1], dtype=torch.int32)
    summaries.update(2, *pools(), pages)
    summaries.update(1, *pools(), pages)
    assert 1 not in summaries
    assert not any(tensor.view(torch.uint8).any() for tensor in tensors(summaries, 0))
    assert all(tensor.view(torch.uint8).any() for tensor in tensors(summaries, 2))


def test_a_changed_key_or_value_makes_its_page_stale(summaries: PageSummaries) -> None:
    (keys, values), pages = pools(), torch.tensor([1, 3, 6])
    summaries.update(0, keys, values, pages)
    assert summaries.stale_pages(0, keys, values, pages) == 0
    keys[3 * 32 + 7] += 1.0
    values[6 * 32] += 1.0
    by_page = [summaries.stale_pages(0, keys, values, pages[i : i + 1]) for i in range(3)]
    assert by_page == [0, int(bool(summaries[0])), int(summaries.has_tail)]
    assert summaries.stale_pages(0, keys, values, pages) == sum(by_page)
    assert summaries.stale_pages(0, keys, values, torch.tensor([], dtype=torch.int64)) == 0
    assert summaries.stale_pages(1, keys, values, pages) == 0


def test_a_wrong_value_mean_makes_its_page_stale() -> None:
    estimator = make_estimator(SparseDecodeOptions(), GEOMETRY)
    summaries = PageSummaries(estimator, [0], PAGES, "cpu", MeanTail(GEOMETRY))
    keys, values = pools()
    pages = torch.arange(1, PAGES)
    summaries.update(0, keys, values, pages)
    expected = values.view(PAGES, 32, 2, 64).mean(1)
    torch.testing.assert_close(summaries.value_means(0)[1:, :, 0], expected[1:])
    summaries.value_means(0)[4, 1, 0, 63] = float("nan")
    assert summaries.stale_pages(0, keys, values, pages) == 1


@pytest.mark.parametrize(("page_size", "cells"), [(16, 1), (64, 1), (128, 2)])
def test_value_means_are_of_at_most_64_tokens(page_size: int, cells: int) -> None:
    geometry = Geometry(kv_heads=2, group_size=1, head_dim=64, dtype=torch.float32, page_size=page_size, block_size=16)
    tail = MeanTail(geometry)
    means = tail.allocate(3, "cpu")
    values = torch.randn(3 * page_size, 2, 64)
    tail.update(values, torch.tensor([2]), means)
    expected = values.view(3, cells, page_size // cells, 2, 64).mean(2).transpose(1, 2)
    torch.testing.assert_close(means[2], expected[2])
    assert means.nbytes == tail.summary_bytes() * 2 * 3 * page_size


def test_values_may_be_numbered_as_summaries_are_and_not_as_keys(summaries: PageSummaries) -> None:
    """As those of a pool whose keys lie in rows of open pages until their page is full."""
    keys, values = pools()
    page = torch.tensor([4])
    summaries.update(0, keys, values, page)
    expected = [tensor[4].clone() for tensor in tensors(summaries, 0)]
    rows = keys[4 * 32 : 5 * 32].clone()
    summaries.update(2, rows, values, torch.tensor([0]), targets=page, value_pages=page)
    for tensor, same in zip(tensors(summaries, 2), expected, strict=True):
        assert torch.equal(tensor[4].view(torch.uint8), same.view(torch.uint8))
        assert tensor.view(torch.uint8).flatten(1).any(1).tolist() == [False] * 4 + [True] + [False] * 2
