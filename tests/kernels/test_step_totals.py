"""Totals of a step: kernel = reference = brute force; padded rows and steps of padding alone do not count."""

import pytest
import torch
from factories import DEVICE
from sparse_kernels.step_totals import FIELDS, step_totals

IMPLS = ["torch", "triton"]


def brute_force(lengths: list[int], page_size: int, block_size: int, min_context: int) -> list[int]:
    scanned = [length for length in lengths if length and length >= min_context]
    closed = sum(length // page_size * page_size for length in scanned)
    return [
        int(any(lengths)),
        sum(length > 0 for length in lengths),
        sum(lengths),
        sum(-(-length // block_size) for length in lengths),
        closed,
        sum(scanned) - closed,
        int(bool(scanned)),
    ]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("min_context", [0, 64, 10**6])
@pytest.mark.parametrize(("page_size", "block_size"), [(16, 8), (64, 16), (128, 128)])
@pytest.mark.parametrize("lengths", [[1], [0, 0, 0], [63, 0, 64, 65, 130_000], [7 * i % 300 for i in range(1500)]])
def test_totals_add_up(impl: str, min_context: int, page_size: int, block_size: int, lengths: list[int]) -> None:
    totals = torch.arange(len(FIELDS), dtype=torch.int64, device=DEVICE) * 10**10
    expected = [
        start + 2 * value
        for start, value in zip(totals.tolist(), brute_force(lengths, page_size, block_size, min_context), strict=True)
    ]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        step_totals(
            seq_lens, page_size=page_size, block_size=block_size, min_context=min_context, totals=totals, impl=impl
        )
    assert totals.tolist() == expected


def test_refuses_other_totals() -> None:
    lengths = torch.ones(1, dtype=torch.int32)
    for totals in (torch.zeros(7), torch.zeros(6, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"totals is .*: give int64 \[7\]"):
            step_totals(lengths, page_size=16, block_size=8, min_context=0, totals=totals)
