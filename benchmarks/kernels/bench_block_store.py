"""New keys and values to a pinned host pool: of a decode step, and of chunks of prefill. Bytes: those written there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import block_store

from .common import Measurement, Suite, time_in_turn
from .slots import pinned

PAGES = 1024
PREFILL = (2048, 8192, 32768)


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures the suite's batch sizes as decode steps, and chunks of prefill."""
    heads, dim, page, device = suite.num_kv_heads, suite.head_dim, suite.page_size, suite.device
    shape = (PAGES, heads, suite.blocks_per_page, 2, suite.block_size, dim)
    host = pinned(torch.zeros(shape, dtype=suite.dtype))
    slot_map = torch.full((heads, PAGES * suite.blocks_per_page), -1, dtype=torch.int32, device=device)
    opened = torch.zeros((max(suite.batches) * page, heads, dim), dtype=suite.dtype, device=device)
    order = torch.randperm(PAGES, device=device)
    for kind, tokens in [("decode", size) for size in suite.batches] + [("prefill", tokens) for tokens in PREFILL]:
        if tokens > PAGES * page:
            continue
        k = torch.randn((tokens, heads, dim), dtype=suite.dtype, device=device)
        v = torch.randn_like(k)
        index = torch.arange(tokens, device=device)
        if kind == "decode":
            slots, open_slots = order[index % PAGES] * page + 5, index.int() * page + 5
        else:
            slots, open_slots = order[index // page] * page + index % page, torch.full_like(index, -1).int()
        stores = partial(block_store, k, v, slots, open_slots, slot_map)
        sizes = {"page_size": page, "block_size": suite.block_size}
        call = partial(stores, host=host, open_k=opened, open_v=torch.zeros_like(opened), **sizes)
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        at = slots[-1].cpu()
        inner = at % page
        stored = host[at // page, :, inner // suite.block_size, 1, inner % suite.block_size]
        if not torch.equal(stored, v[-1].cpu()):
            raise RuntimeError(f"block_store of {tokens} tokens ({kind}) stored something else")
        moved = 2 * tokens * heads * suite.head_bytes
        yield Measurement("block_store", f"{kind}, {tokens} tokens", 1, 0, None, time_in_turn([call]), moved)
