"""Thumbnails and mean values of pages in one launch. Bytes: keys, values, and what is written.

The context column is the tokens summarised.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import page_summary, page_summary_reference

from .common import Measurement, Suite, time_in_turn
from .pages import measure_pages


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures four bits, and launches that find no page."""
    pages, heads, dim, bits = suite.num_pages, suite.num_kv_heads, suite.head_dim, 4
    codes = torch.zeros(pages, heads, suite.page_size, dim * bits // 8, dtype=torch.uint8, device=suite.device)
    low_step = torch.zeros(pages, heads, 2, dim, dtype=torch.bfloat16, device=suite.device)
    means = torch.zeros(pages, heads, 1, dim, dtype=suite.dtype, device=suite.device)
    arguments = {
        "bits": bits,
        "page_size": suite.page_size,
        "cell": suite.page_size,
        "codes": codes,
        "low_step": low_step,
        "means": means,
    }
    operation = partial(page_summary, suite.k_pool, suite.v_pool, **arguments)
    yield from measure_pages(
        suite,
        "page_summary",
        f"{bits} bits",
        operation,
        partial(page_summary_reference, suite.k_pool, suite.v_pool, **arguments),
        [codes, low_step, means],
        heads * (suite.page_size * (2 * suite.head_bytes + dim * bits // 8) + 4 * dim + suite.head_bytes),
    )
    none = torch.full((64,), -1, dtype=torch.int32, device=suite.device)
    seconds = time_in_turn([partial(operation, none)] * 8)
    yield Measurement("page_summary", f"{bits} bits, no page of 64", 1, 0, None, seconds, None)
