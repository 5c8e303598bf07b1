"""New values to the pool and new keys to open pages, of decode steps and chunks of prefill. Bytes: those written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import split_store

from .common import Measurement, Suite, time_in_turn

PREFILL = (2048, 8192, 32768)


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures the suite's batch sizes as decode steps, and chunks of prefill, of which no key is open."""
    heads, dim, page, device = suite.num_kv_heads, suite.head_dim, suite.page_size, suite.device
    v_pool = torch.zeros((2 * max(PREFILL), heads, dim), dtype=suite.dtype, device=device)
    open_keys = torch.zeros((max(suite.batches) * page, heads, dim), dtype=suite.dtype, device=device)
    order = torch.randperm(len(v_pool) // page, device=device)
    for kind, tokens in [("decode", size) for size in suite.batches] + [("prefill", tokens) for tokens in PREFILL]:
        k = torch.randn((tokens, heads, dim), dtype=suite.dtype, device=device)
        v = torch.randn_like(k)
        index = torch.arange(tokens, device=device)
        if kind == "decode":
            slots, open_slots = order[index] * page + 5, index.int() * page + 5
        else:
            slots, open_slots = order[index // page] * page + index % page, torch.full_like(index, -1).int()
        call = partial(split_store, k, v, slots, open_slots, v_pool=v_pool, open_keys=open_keys)
        call()
        if not torch.equal(v_pool[slots], v) or (kind == "decode" and not torch.equal(open_keys[open_slots.long()], k)):
            raise RuntimeError(f"split_store of {tokens} tokens ({kind}) stored something else")
        moved = (1 + (kind == "decode")) * tokens * heads * suite.head_bytes
        yield Measurement("split_store", f"{kind}, {tokens} tokens", 1, 0, None, time_in_turn([call]), moved)
