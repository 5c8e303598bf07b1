"""Splitting the keys of full pages. Bytes: the keys, and what is kept of them. The context column is their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sparse_kernels import split_quantise, split_quantise_reference

from .common import Measurement, Suite
from .pages import measure_pages
from .split import empty_pages, page_bytes


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures the page counts of a decode step and of chunks of prefill."""
    made = empty_pages(suite)
    yield from measure_pages(
        suite,
        "split_quantise",
        "keys",
        partial(split_quantise, suite.k_pool, page_size=suite.page_size, **made),
        partial(split_quantise_reference, suite.k_pool, page_size=suite.page_size, **made),
        list(made.values()),
        suite.num_kv_heads * suite.page_size * suite.head_bytes + page_bytes(suite),
    )
