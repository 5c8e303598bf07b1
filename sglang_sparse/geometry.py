"""The shapes that selection, summaries and attention agree on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE_ALIGNMENT = 16


def table_pages(tokens: int, page_size: int) -> int:
    """Pages that a request's row in the step's buffers has room for, when requests have up to `tokens` tokens.

    A multiple of 16, so that rows of blocks are one as well: the rules then load them in vectors.
    """
    return -(-tokens // (page_size * PAGE_ALIGNMENT)) * PAGE_ALIGNMENT


def heads_of_rank(kv_heads: int, rank: int, ranks: int) -> range:
    """Which of a model's `kv_heads` KV heads the tensor-parallel rank `rank` of `ranks` has, as SGLang divides them.

    With more ranks than KV heads each head is on several neighbouring ranks, which share its query heads.

    Raises:
        ValueError: neither number divides the other.
    """
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"{kv_heads} KV heads cannot be divided over {ranks} ranks")
    if ranks <= kv_heads:
        each = kv_heads // ranks
        return range(rank * each, (rank + 1) * each)
    head = rank // (ranks // kv_heads)
    return range(head, head + 1)


@dataclass(frozen=True)
class Geometry:
    """One attention layer's KV cache and how it is cut into pages and blocks; the same for every layer.

    Under tensor parallelism it is of the heads that this rank has.
    """

    kv_heads: int
    group_size: int
    """Query heads that share a KV head."""
    head_dim: int
    dtype: torch.dtype
    page_size: int
    """Tokens in a physical page."""
    block_size: int
    """Tokens in a block; divides `page_size`."""
    first_kv_head: int = 0
    """Which of the model's KV heads the first one here is; those before it are on other ranks."""

    @property
    def model_heads(self) -> range:
        """Which of the model's KV heads these are."""
        return range(self.first_kv_head, self.first_kv_head + self.kv_heads)

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.group_size

    @property
    def blocks_per_page(self) -> int:
        return self.page_size // self.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of key and value that one token has in one layer and KV head."""
        return 2 * self.head_dim * self.dtype.itemsize
