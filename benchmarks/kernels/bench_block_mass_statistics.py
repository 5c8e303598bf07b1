"""Block mass from means, means and variances, or minima and maxima. Bytes: the statistics, and the log masses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sparse_kernels import (
    STATISTICS_OF_KIND,
    block_mass_statistics,
    block_mass_statistics_reference,
    block_statistics,
)

from .block_mass import mass_arguments, measure_block_mass
from .common import Measurement, Suite


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every kind, batch size and context."""
    pages = torch.arange(suite.num_pages, device=suite.device, dtype=torch.int32)
    for kind, number in STATISTICS_OF_KIND.items():
        shape = (suite.num_pages, suite.num_kv_heads, suite.blocks_per_page, number, suite.head_dim)
        statistics = torch.empty(shape, dtype=suite.dtype, device=suite.device)
        block_statistics(
            suite.k_pool, pages, kind=kind, page_size=suite.page_size, block_size=suite.block_size, out=statistics
        )
        arguments = {**mass_arguments(suite), "kind": kind}

        def with_inputs(operation, statistics=statistics, arguments=arguments):
            return lambda batch, out: operation(
                batch.q, suite.k_pool, statistics, batch.page_table, batch.seq_lens, **arguments, out=out
            )

        yield from measure_block_mass(
            suite,
            "block_mass_statistics",
            kind,
            with_inputs(block_mass_statistics),
            with_inputs(block_mass_statistics_reference),
            suite.blocks_per_page * number * suite.head_bytes,
            1e-2,
        )
