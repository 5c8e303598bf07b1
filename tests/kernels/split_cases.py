"""Split keys of paged cases. What must not be read is poisoned."""

from __future__ import annotations

import dataclasses

import torch
from factories import DEVICE, PagedCase, poisoned
from sparse_kernels import SplitKeys, split_quantise


def empty_pages(pages: int, kv_heads: int, page_size: int, head_dim: int) -> dict[str, torch.Tensor]:
    """Poisoned codes, bounds and residuals."""
    return {
        "codes": poisoned(pages, kv_heads, page_size, head_dim // 4, dtype=torch.uint8),
        "low_step": poisoned(pages, kv_heads, 2, head_dim).to(torch.bfloat16),
        "residual": poisoned(pages, kv_heads, page_size, head_dim, dtype=torch.uint8),
    }


def split_keys(case: PagedCase) -> SplitKeys:
    """The case's closed pages split, and its open pages in rows of their own, in another order."""
    pages = empty_pages(case.num_pages, case.num_kv_heads, case.page_size, case.head_dim)
    split_quantise(case.k_pool, case.closed_pages(), page_size=case.page_size, **pages, impl="torch")
    order = torch.randperm(case.batch + 2, generator=torch.Generator().manual_seed(1))
    open_keys = poisoned((case.batch + 2) * case.page_size, case.num_kv_heads, case.head_dim).to(case.k_pool.dtype)
    for b, length in enumerate(case.lengths):
        opened = length % case.page_size
        if opened:
            at = int(order[b]) * case.page_size
            open_keys[at : at + opened] = case.keys(b)[length - opened :]
    return SplitKeys(**pages, open_keys=open_keys, open_rows=order.int().to(DEVICE))


def without_split_keys(case: PagedCase, keys: SplitKeys) -> PagedCase:
    """The same case, with a pool of what the split keys stand for, all in fp32."""
    from sparse_kernels.split_keys import reconstruct

    k_pool = case.k_pool.float().clone()
    closed = case.closed_pages().long()
    slots = closed[:, None] * case.page_size + torch.arange(case.page_size, device=closed.device)
    whole = reconstruct(keys.codes[closed], keys.low_step[closed], keys.residual[closed])
    k_pool[slots.flatten()] = whole.transpose(1, 2).flatten(0, 1)
    return dataclasses.replace(case, q=case.q.float(), k_pool=k_pool, v_pool=case.v_pool.float())
