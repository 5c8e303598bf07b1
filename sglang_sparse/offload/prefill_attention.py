"""Dense attention of a prefill batch over staged prefixes and its own new tokens.

Of two kinds, one of which is chosen at start: FlashAttention 3 reads the staging as it lies, torch a contiguous copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from sglang_sparse.dense_attention import flash_functions, flash_or
from sglang_sparse.dense_prefill import attend_to_prefixes
from sglang_sparse.geometry import Geometry


class PrefillAttention(Protocol):
    """`begin` for each batch, then `attend` for each layer."""

    name: str

    def begin(self, prefix_lens: Sequence[int], extend_lens: Sequence[int], device: torch.device) -> None:
        """Announces requests with so many tokens in the staging, whole pages, and so many new ones, above 0."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        staging: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Causal attention of all requests.

        Args:
            q: `[T, Hq, D]`, the requests' new tokens one after another.
            k, v: `[T, Hkv, D]`, last dimension contiguous.
            staging: `[pages, Hkv, blocks_per_page, 2, block, D]`, contiguous; the requests' prefixes one after another.
            out: `[T, Hq, D]`, written.
        """


class TorchAttention:
    """torch's `scaled_dot_product_attention`, request by request."""

    name = "torch"

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._lengths: list[tuple[int, int]] = []

    def begin(self, prefix_lens: Sequence[int], extend_lens: Sequence[int], device: torch.device) -> None:
        self._lengths = list(zip(prefix_lens, extend_lens, strict=True))

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        staging: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        g = self._geometry
        first_pages = list(itertools.accumulate((prefix // g.page_size for prefix, _ in self._lengths), initial=0))

        def copy_prefix(r: int, both: torch.Tensor) -> None:
            staged = staging[first_pages[r] : first_pages[r + 1]].permute(3, 1, 0, 2, 4, 5)
            both.unflatten(2, staged.shape[2:5]).copy_(staged)

        def make_room(shape: tuple[int, ...]) -> torch.Tensor:
            # The one copy of a prefix that `sizing` has room for.
            return torch.empty(shape, dtype=g.dtype, device=q.device)

        attend_to_prefixes(
            g, self._lengths, q, k, v, copy_prefix=copy_prefix, make_room=make_room, scale=scale, out=out
        )


class FlashAttention:
    """FlashAttention 3: over the new tokens, causally, and over the staging, as a paged cache whose pages are blocks of
    one KV head; then both together by their log-sum-exps.

    Args:
        with_kvcache, varlen: `sgl_kernel.flash_attn`'s `flash_attn_with_kvcache` and `flash_attn_varlen_func`.
    """

    name = "FlashAttention 3"

    def __init__(self, geometry: Geometry, with_kvcache: Callable, varlen: Callable) -> None:
        self._geometry = geometry
        self._with_kvcache, self._varlen = with_kvcache, varlen

    def begin(self, prefix_lens: Sequence[int], extend_lens: Sequence[int], device: torch.device) -> None:
        g, requests = self._geometry, len(extend_lens)
        pages = [prefix // g.page_size for prefix in prefix_lens]
        self._longest, self._cached = max(extend_lens), any(pages)
        numbers = [0, *itertools.accumulate(extend_lens), *prefix_lens, *itertools.accumulate(pages, initial=0)]
        # Pinned: a copy of pageable memory would wait for all that the stream has to do.
        host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._starts, self._prefixes, first_pages = host.to(device, non_blocking=True).split(
            [requests + 1, requests, requests + 1]
        )
        if not self._cached:
            return
        block = torch.arange(max(pages) * g.blocks_per_page, dtype=torch.int32, device=device)
        page = first_pages[:-1, None] + block // g.blocks_per_page
        # Entries beyond a request's prefix are not read, but stay within the staging.
        page = page.minimum(first_pages[-1] - 1)
        self._table = page * (g.kv_heads * g.blocks_per_page) + block % g.blocks_per_page
        token = torch.arange(sum(extend_lens), dtype=torch.int32, device=device)
        self._alone = (self._prefixes == 0)[torch.searchsorted(self._starts[1:], token, right=True)]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        staging: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        q = q.contiguous()
        own = self._varlen(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=self._starts,
            cu_seqlens_k=self._starts,
            max_seqlen_q=self._longest,
            max_seqlen_k=self._longest,
            softmax_scale=scale,
            causal=True,
            return_softmax_lse=self._cached,
        )
        if not self._cached:
            out.copy_(own)
            return
        own, own_lse, *_ = own
        keys, values = paged_views(staging)
        cached, cached_lse, *_ = self._with_kvcache(
            q=q,
            k_cache=keys,
            v_cache=values,
            page_table=self._table,
            cache_seqlens=self._prefixes,
            cu_seqlens_q=self._starts,
            max_seqlen_q=self._longest,
            softmax_scale=scale,
            causal=False,
            return_softmax_lse=True,
        )
        # What a request without a prefix got from none is not defined everywhere, and its log-sum-exp neither.
        change = cached.float().sub_(own).mul_((cached_lse - own_lse).sigmoid().T[..., None])
        out.copy_(change.masked_fill_(self._alone[:, None, None], 0).add_(own))


def paged_views(staging: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `staging [pages, Hkv, blocks_per_page, 2, block, D]` as `[units, block, Hkv, D]`.

    Block `i` of page `p` is unit `p * Hkv * blocks_per_page + i`: of head 0, with the other heads' `blocks_per_page`
    units further up each.
    """
    pages, kv_heads, per_page, _, block, head_dim = staging.shape
    unit = 2 * block * head_dim
    shape = (pages * kv_heads * per_page - (kv_heads - 1) * per_page, block, kv_heads, head_dim)
    strides = (unit, head_dim, per_page * unit, 1)
    start = staging.storage_offset()
    return staging.as_strided(shape, strides, start), staging.as_strided(shape, strides, start + block * head_dim)


def choose(geometry: Geometry, device: torch.device | str, backend: str) -> PrefillAttention:
    """FlashAttention 3 on a GPU where SGLang would use it and it says the same as torch; else torch. Logs which.

    Args:
        backend: SGLang's name of the prefill backend that it would have built.
    """

    def make() -> PrefillAttention:
        return FlashAttention(geometry, *flash_functions(geometry, backend))

    def difference(one: PrefillAttention, other: PrefillAttention) -> float:
        return compare(one, other, geometry, torch.device(device))

    fallback: PrefillAttention = TorchAttention(geometry)
    return flash_or(fallback, make, difference, device)


def compare(one: PrefillAttention, other: PrefillAttention, geometry: Geometry, device: torch.device) -> float:
    """The largest difference between two kinds on a ragged batch of normal numbers; waits for the device."""
    g, prefix_pages, extends = geometry, [3, 0, 1], [70, 33, 1]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(g.dtype)

    staging = normal(sum(prefix_pages) + 1, g.kv_heads, g.blocks_per_page, 2, g.block_size, g.head_dim)
    # Keys and values of a layer are parts of what one projection made.
    qkv: Any = normal(sum(extends), g.query_heads + 2 * g.kv_heads, g.head_dim)
    q, k, v = qkv.split([g.query_heads, g.kv_heads, g.kv_heads], 1)
    outs = []
    for each in (one, other):
        outs.append(torch.empty_like(q))
        each.begin([pages * g.page_size for pages in prefix_pages], extends, device)
        each.attend(q, k, v, staging, scale=g.head_dim**-0.5, out=outs[-1])
    return float((outs[0].float() - outs[1].float()).abs().max())
