"""What the benchmarks of the page-summary operations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from .common import MAX_SETS, ROTATED_BYTES, Measurement, Suite, check_close, time_in_turn

PAGE_COUNTS = (1, 8, 64, 128, 1024)
"""Pages summarised in a call: a decode step closes a few, a prefill chunk of 8192 tokens 128."""


def measure_pages(
    suite: Suite,
    name: str,
    case: str,
    operation: Callable[[torch.Tensor], None],
    reference: Callable[[torch.Tensor], None],
    results: list[torch.Tensor],
    page_bytes: int,
) -> Iterator[Measurement]:
    """Measures `operation(pages)` for `PAGE_COUNTS`.

    Args:
        reference: the torch reference on the same outputs.
        results: the outputs, indexed by physical page.
        page_bytes: bytes read and written for a page.
    """
    for count in PAGE_COUNTS:
        if count >= suite.num_pages:
            continue
        sets = min(max(-(-ROTATED_BYTES // (count * page_bytes)), 1), MAX_SETS, (suite.num_pages - 1) // count)
        chosen = [
            torch.arange(1 + i * count, 1 + (i + 1) * count, dtype=torch.int32, device=suite.device)
            for i in range(sets)
        ]
        calls = [partial(operation, pages) for pages in chosen]
        calls[0]()
        index = chosen[0].long()
        computed = [result[index].clone() for result in results]
        reference(chosen[0])
        for result, expected in zip(computed, results, strict=True):
            check_close(f"{name} {case} of {count} pages", result, expected[index], 1e-2)
        moved = count * page_bytes
        tokens = count * suite.page_size
        yield Measurement(name, f"{case}, {count} pages", 1, tokens, None, time_in_turn(calls), moved)
