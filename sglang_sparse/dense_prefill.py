"""Dense attention of prefill batches whose prefixes lie in a KV pool of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from sglang_sparse.dense_attention import DenseAttention, TorchDense
from sglang_sparse.geometry import Geometry


@dataclass(frozen=True)
class PrefillBatch:
    """The requests of one prefill, their new tokens one after another."""

    page_table: torch.Tensor
    """`[R, max_pages]` int32, pages of each request, prefix and new tokens."""
    prefix_lens: list[int]
    """Tokens in the pool already; whole pages."""
    extend_lens: list[int]
    """New tokens; sum `T`."""
    rows: torch.Tensor
    """`[R]`, rows of the open pages."""

    def check(self, page_size: int) -> None:
        """Raises ValueError if a prefix ends within a page."""
        if any(prefix % page_size for prefix in self.prefix_lens):
            raise ValueError(f"prefix lengths are {self.prefix_lens}; needed: multiples of page_size={page_size}")

    def places(self, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`pool_slots [T]` int64 and `open_slots [T]` int32 of the new tokens, as `block_store` takes them."""
        device = self.page_table.device
        pool, opened = [], []
        for r, (prefix, extend, row) in enumerate(zip(self.prefix_lens, self.extend_lens, self.rows, strict=True)):
            position = torch.arange(prefix, prefix + extend, device=device)
            page, inner = position // page_size, position % page_size
            pool.append(self.page_table[r].long()[page] * page_size + inner)
            is_open = page == (prefix + extend - 1) // page_size
            opened.append(torch.where(is_open, row * page_size + inner, -1).int())
        return torch.cat(pool), torch.cat(opened)


def attend_to_prefixes(
    geometry: Geometry,
    lengths: Iterable[tuple[int, int]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    copy_prefix: Callable[[int, torch.Tensor], None],
    make_room: Callable[[tuple[int, ...]], torch.Tensor],
    scale: float,
    out: torch.Tensor,
    replace_keys: Callable[[int, torch.Tensor], None] | None = None,
    attention: DenseAttention | None = None,
) -> None:
    """Causal attention of the new tokens over prefixes and themselves, request by request.

    Args:
        lengths: of each request, tokens of its prefix and new tokens; the latter sum to `T`.
        q: `[T, Hq, D]`.
        k, v: `[T, Hkv, D]`.
        copy_prefix: called with a request's number and `[2, Hkv, prefix, D]`, which it fills with keys and values;
            not called for requests without a prefix.
        make_room: gives a tensor of shape `[2, Hkv, tokens, D]` in KV dtype, which is needed for one request at a time.
        out: `[T, Hq, D]`, written.
        replace_keys: called with a request's number and the keys of its new tokens, `[Hkv, new, D]`, which it may
            replace by what is kept of them.
        attention: of one request; torch's unless given.
    """
    attention = attention or TorchDense()
    first = 0
    for r, (prefix, extend) in enumerate(lengths):
        own = slice(first, first + extend)
        both = make_room((2, geometry.kv_heads, prefix + extend, geometry.head_dim))
        if prefix:
            copy_prefix(r, both[:, :, :prefix])
        both[0, :, prefix:], both[1, :, prefix:] = k[own].transpose(0, 1), v[own].transpose(0, 1)
        if replace_keys is not None:
            replace_keys(r, both[0, :, prefix:])
        attention(q[own], both[0], both[1], scale=scale, out=out[own])
        first += extend
