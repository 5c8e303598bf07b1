"""Block mass from low-bit key thumbnails. Bytes: codes, lows and steps of the closed pages, and the log masses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sparse_kernels import block_mass_thumbnail, block_mass_thumbnail_reference, thumbnail

from .block_mass import mass_arguments, measure_block_mass
from .common import Measurement, Suite


def make_thumbnails(suite: Suite, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and lows and steps, of every page of the suite's pool."""
    pages, heads = suite.num_pages, suite.num_kv_heads
    code_shape = (pages, heads, suite.page_size, suite.head_dim * bits // 8)
    codes = torch.empty(code_shape, dtype=torch.uint8, device=suite.device)
    low_step = torch.empty(pages, heads, 2, suite.head_dim, dtype=torch.bfloat16, device=suite.device)
    every_page = torch.arange(pages, device=suite.device, dtype=torch.int32)
    thumbnail(suite.k_pool, every_page, bits=bits, page_size=suite.page_size, codes=codes, low_step=low_step)
    return codes, low_step


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures 2, 3 and 4 bits, every batch size and context."""
    for bits in (2, 3, 4):
        codes, low_step = make_thumbnails(suite, bits)
        arguments = {**mass_arguments(suite), "bits": bits}

        def with_inputs(operation, codes=codes, low_step=low_step, arguments=arguments):
            return lambda batch, out: operation(
                batch.q, suite.k_pool, codes, low_step, batch.page_table, batch.seq_lens, **arguments, out=out
            )

        yield from measure_block_mass(
            suite,
            "block_mass_thumbnail",
            f"{bits} bits",
            with_inputs(block_mass_thumbnail),
            with_inputs(block_mass_thumbnail_reference),
            suite.page_size * suite.head_dim * bits // 8 + 4 * suite.head_dim,
            2e-2,
        )
