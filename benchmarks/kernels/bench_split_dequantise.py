"""Keys of split pages put together again for prefill. Bytes: what is kept, and the keys.

The context column is their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import split_dequantise, split_dequantise_reference

from .common import MAX_SETS, ROTATED_BYTES, Measurement, Suite, check_close, time_in_turn
from .split import page_bytes, split_pages

PAGE_COUNTS = (16, 128, 512, 2048)
"""Pages of a prefix: 1,024 to 131,072 tokens of a page of 64."""


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures prefixes of several lengths."""
    sources = list(split_pages(suite).values())
    for count in PAGE_COUNTS:
        if count >= suite.num_pages:
            continue
        moved = count * (page_bytes(suite) + suite.num_kv_heads * suite.page_size * suite.head_bytes)
        sets = min(max(-(-ROTATED_BYTES // moved), 1), MAX_SETS, (suite.num_pages - 1) // count)
        shape = (suite.num_kv_heads, count * suite.page_size, suite.head_dim)
        out, expected = (torch.empty(shape, dtype=suite.dtype, device=suite.device) for _ in range(2))
        prefixes = [torch.arange(1 + i * count, 1 + (i + 1) * count, device=suite.device) for i in range(sets)]
        calls = [partial(split_dequantise, *sources, each, page_size=suite.page_size, out=out) for each in prefixes]
        calls[0]()
        split_dequantise_reference(*sources, prefixes[0], page_size=suite.page_size, out=expected)
        check_close(f"split_dequantise of {count} pages", out, expected, 1e-3)
        tokens = count * suite.page_size
        yield Measurement("split_dequantise", f"{count} pages", 1, tokens, None, time_in_turn(calls), moved)
