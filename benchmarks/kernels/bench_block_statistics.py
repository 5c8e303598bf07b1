"""Block statistics of pages. Bytes: the keys and the statistics. The context column is the tokens summarised."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import STATISTICS_OF_KIND, block_statistics, block_statistics_reference

from .common import Measurement, Suite
from .pages import measure_pages


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every kind."""
    for kind, number in STATISTICS_OF_KIND.items():
        shape = (suite.num_pages, suite.num_kv_heads, suite.blocks_per_page, number, suite.head_dim)
        out = torch.zeros(shape, dtype=suite.dtype, device=suite.device)
        arguments = {"kind": kind, "page_size": suite.page_size, "block_size": suite.block_size, "out": out}
        yield from measure_pages(
            suite,
            "block_statistics",
            kind,
            partial(block_statistics, suite.k_pool, **arguments),
            partial(block_statistics_reference, suite.k_pool, **arguments),
            [out],
            suite.num_kv_heads * (suite.page_size + suite.blocks_per_page * number) * suite.head_bytes,
        )
