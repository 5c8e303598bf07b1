"""One layer of split keys, for the benchmarks of their operations."""

from __future__ import annotations

import torch
from sparse_kernels import SplitKeys, split_quantise

from .common import Batch, Suite

PAGES_AT_ONCE = 4096


def empty_pages(suite: Suite) -> dict[str, torch.Tensor]:
    """Codes, bounds and residuals of the suite's pages, zeroed."""
    pages, heads, page, dim = suite.num_pages, suite.num_kv_heads, suite.page_size, suite.head_dim
    device = suite.device
    return {
        "codes": torch.zeros(pages, heads, page, dim // 4, dtype=torch.uint8, device=device),
        "low_step": torch.zeros(pages, heads, 2, dim, dtype=torch.bfloat16, device=device),
        "residual": torch.zeros(pages, heads, page, dim, dtype=torch.uint8, device=device),
    }


def split_pages(suite: Suite) -> dict[str, torch.Tensor]:
    """All pages of the suite's key pool, split."""
    made = empty_pages(suite)
    for first in range(0, suite.num_pages, PAGES_AT_ONCE):
        pages = torch.arange(first, min(first + PAGES_AT_ONCE, suite.num_pages), device=suite.device)
        split_quantise(suite.k_pool, pages, page_size=suite.page_size, **made)
    return made


def with_open_pages(suite: Suite, batch: Batch, pages: dict[str, torch.Tensor]) -> SplitKeys:
    """The keys of a batch, whose open pages hold what the pool does."""
    last = ((batch.seq_lens - 1) // suite.page_size).long()
    own = batch.page_table.gather(1, last[:, None])[:, 0].long()
    tokens = (own[:, None] * suite.page_size + torch.arange(suite.page_size, device=suite.device)).flatten()
    rows = torch.arange(batch.size, dtype=torch.int32, device=suite.device)
    return SplitKeys(**pages, open_keys=suite.k_pool[tokens], open_rows=rows)


def page_bytes(suite: Suite) -> int:
    """Of a split page's keys, over all KV heads."""
    return suite.num_kv_heads * suite.head_dim * (suite.page_size * 5 // 4 + 4)
