"""Thumbnails of pages. Bytes: the keys, the codes, the lows and steps. The context column is the tokens summarised."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import thumbnail, thumbnail_reference

from .common import Measurement, Suite
from .pages import measure_pages


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures 2, 3 and 4 bits."""
    pages, heads, dim = suite.num_pages, suite.num_kv_heads, suite.head_dim
    for bits in (2, 3, 4):
        codes = torch.zeros(pages, heads, suite.page_size, dim * bits // 8, dtype=torch.uint8, device=suite.device)
        low_step = torch.zeros(pages, heads, 2, dim, dtype=torch.bfloat16, device=suite.device)
        arguments = {"bits": bits, "page_size": suite.page_size, "codes": codes, "low_step": low_step}
        yield from measure_pages(
            suite,
            "thumbnail",
            f"{bits} bits",
            partial(thumbnail, suite.k_pool, **arguments),
            partial(thumbnail_reference, suite.k_pool, **arguments),
            [codes, low_step],
            heads * (suite.page_size * (suite.head_bytes + dim * bits // 8) + 4 * dim),
        )
