"""Places of a step's new tokens. Bytes: what each request has read and written, 60 bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import open_places, open_places_reference

from .common import Measurement, Suite, time_in_turn

REQUEST_BYTES = 60


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size and context; half of the requests fill a page."""
    for size, context in suite.cases():
        columns = suite.capacity(context) // suite.blocks_per_page
        whole = -(-context // suite.page_size) * suite.page_size
        lengths = whole - torch.arange(size, dtype=torch.int32, device=suite.device) % 2
        places = torch.arange(size, device=suite.device).flip(0) * suite.page_size
        rows = torch.arange(size, device=suite.device)
        calls, made = [], []
        for _ in range(8):
            result = {
                name: torch.zeros(size, dtype=torch.int32, device=suite.device)
                for name in ("open_slots", "open_rows", "closing_pages", "closing_rows")
            }
            result["pool_slots"] = torch.zeros(size, dtype=torch.int64, device=suite.device)
            result["page_table"] = torch.zeros((size, columns), dtype=torch.int32, device=suite.device)
            calls.append(partial(open_places, places, rows, lengths, page_size=suite.page_size, **result))
            made.append(result)
        calls[0]()
        expected = {name: torch.zeros_like(tensor) for name, tensor in made[0].items()}
        open_places_reference(places, rows, lengths, page_size=suite.page_size, **expected)
        for name, tensor in made[0].items():
            if not torch.equal(tensor, expected[name]):
                raise RuntimeError(f"open_places B={size} context={context}: {name} differs from the reference")
        yield Measurement("open_places", "", size, context, None, time_in_turn(calls), size * REQUEST_BYTES)
