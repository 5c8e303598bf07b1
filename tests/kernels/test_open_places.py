"""Kernel = brute force on random steps, with padded rows and short lists of places; and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from factories import DEVICE, HUGE_PAGE, poisoned
from sparse_kernels import open_places

IMPLS = ["torch", "triton"]
NAMES = ("pool_slots", "open_slots", "open_rows", "closing_pages", "closing_rows")


def outputs(largest: int) -> dict[str, torch.Tensor]:
    return {
        name: poisoned(largest, dtype=torch.int64 if name == "pool_slots" else torch.int32, device=DEVICE)
        for name in NAMES
    }


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("page", "largest", "batch"), [(16, 1, 1), (64, 7, 5), (32, 300, 290), (128, 4, 0)])
def test_random_steps(impl: str, table: bool, dtype: torch.dtype, page: int, largest: int, batch: int) -> None:
    draw = random.Random(f"{page} {dtype}")
    pages = 6
    borders = [1, page - 1, page, page + 1, pages * page - 1, pages * page]
    real = batch - batch // 3
    lengths = [draw.choice([*borders, draw.randrange(1, pages * page), 0]) for _ in range(real)] + [0] * (batch - real)
    rows = [draw.randrange(400) for _ in range(real)] + [HUGE_PAGE] * (batch - real)
    places = [draw.randrange(10**6) for _ in range(real)]
    made = outputs(largest)
    page_table = poisoned(batch + 1, pages, dtype=torch.int32, device=DEVICE)
    expected = {name: tensor.cpu().tolist() for name, tensor in made.items()}
    entries = page_table.cpu().tolist()
    for name in set(NAMES) - {"open_rows"}:
        expected[name] = [-1] * largest
    expected["open_rows"][:batch] = rows
    for b, length in enumerate(lengths):
        if length:
            expected["pool_slots"][b] = places[b]
            expected["open_slots"][b] = rows[b] * page + (length - 1) % page
            if length % page:
                entries[b][length // page] = rows[b] if table else entries[b][length // page]
            else:
                expected["closing_pages"][b], expected["closing_rows"][b] = places[b] // page, rows[b]
    open_places(
        torch.tensor(places, dtype=dtype, device=DEVICE),
        torch.tensor(rows, dtype=dtype, device=DEVICE),
        torch.tensor([*lengths, 99], dtype=dtype, device=DEVICE),
        page_size=page,
        page_table=page_table if table else None,
        impl=impl,
        **made,
    )
    assert {name: tensor.tolist() for name, tensor in made.items()} == expected
    assert page_table.tolist() == entries


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 48}, "page_size is 48"),
        ({"pool_slots": torch.zeros(2, dtype=torch.int32)}, "pool_slots has dtype torch.int32"),
        ({"open_slots": torch.zeros(3, dtype=torch.int32)}, r"open_slots has shape \[3\]; needed: \[2\]"),
        ({"rows": torch.zeros(3, dtype=torch.int32)}, r"rows has shape \[3\]; needed: at most 2"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int32)}, "seq_lens has shape"),
        ({"places": torch.zeros(2)}, "places has dtype torch.float32"),
        ({"page_table": torch.zeros(1, 4, dtype=torch.int32)}, "page_table has shape"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "places": torch.zeros(2, dtype=torch.int64),
        "rows": torch.zeros(2, dtype=torch.int32),
        "seq_lens": torch.zeros(3, dtype=torch.int32),
        "page_size": 16,
        **{name: torch.zeros(2, dtype=torch.int64 if name == "pool_slots" else torch.int32) for name in NAMES},
    }
    with pytest.raises(ValueError, match=message):
        open_places(**(arguments | change))
