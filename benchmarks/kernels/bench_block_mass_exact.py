"""Block mass from all keys: the oracle. Bytes: all keys, and the log masses."""

from __future__ import annotations

from collections.abc import Iterator

from sparse_kernels import block_mass_exact, block_mass_exact_reference

from .block_mass import mass_arguments, measure_block_mass
from .common import Measurement, Suite


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size and context."""
    arguments = mass_arguments(suite)

    def with_inputs(operation):
        return lambda batch, out: operation(
            batch.q, suite.k_pool, batch.page_table, batch.seq_lens, **arguments, out=out
        )

    yield from measure_block_mass(
        suite,
        "block_mass_exact",
        "",
        with_inputs(block_mass_exact),
        with_inputs(block_mass_exact_reference),
        suite.page_size * suite.head_bytes,
        5e-3,
    )
