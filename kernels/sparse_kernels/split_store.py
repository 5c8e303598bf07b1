"""Writes new values to the pool, and new keys to the pages that requests are still writing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_dtype, check_inner_contiguous, check_shape
from ._dispatch import use_triton

TOKENS = 4
"""Tokens that a program stores of one head."""


def split_store_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    pool_slots: torch.Tensor,
    open_slots: torch.Tensor,
    *,
    v_pool: torch.Tensor,
    open_keys: torch.Tensor,
) -> None:
    """`split_store` in plain torch."""
    stored = pool_slots >= 0
    v_pool[pool_slots[stored]] = v[stored]
    opened = stored & (open_slots >= 0)
    open_keys[open_slots[opened].long()] = k[opened]


@triton.jit
def _split_store_kernel(
    k_ptr,
    v_ptr,
    pool_slots,
    open_slots,
    v_pool,
    open_keys,
    tokens,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    pool_stride_t,
    pool_stride_h,
    open_stride_t,
    open_stride_h,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.load(pool_slots + token, mask=token < tokens, other=-1)
    opened = tl.load(open_slots + token, mask=place >= 0, other=-1).to(tl.int64)
    channel = tl.arange(0, HEAD_DIM_PAD)[None, :]
    token = token.to(tl.int64)[:, None]
    mask = (place >= 0)[:, None] & (channel < HEAD_DIM)
    v = tl.load(v_ptr + token * v_stride_t + h * v_stride_h + channel, mask=mask)
    tl.store(v_pool + place[:, None] * pool_stride_t + h * pool_stride_h + channel, v, mask=mask)
    mask = (opened >= 0)[:, None] & (channel < HEAD_DIM)
    k = tl.load(k_ptr + token * k_stride_t + h * k_stride_h + channel, mask=mask)
    tl.store(open_keys + opened[:, None] * open_stride_t + h * open_stride_h + channel, k, mask=mask)


def split_store(
    k: torch.Tensor,
    v: torch.Tensor,
    pool_slots: torch.Tensor,
    open_slots: torch.Tensor,
    *,
    v_pool: torch.Tensor,
    open_keys: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Stores `T` tokens of one layer: a decode step's, or a chunk of prefill.

    Args:
        k, v: `[T, Hkv, D]` in the pool's dtype, last dimension contiguous.
        pool_slots: `[T]` int64, places of the values (`page * page_size + offset`); negative ones are skipped, as
            padded rows of a batch are.
        open_slots: `[T]` int32, places of the keys in `open_keys`; negative for tokens of pages that are full.
        v_pool, open_keys: `[slots, Hkv, D]`, last dimension contiguous, written.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    check_shape("k", k, None, None, None)
    tokens, kv_heads, head_dim = k.shape
    check_shape("v", v, tokens, kv_heads, head_dim)
    for name, pool in (("v_pool", v_pool), ("open_keys", open_keys)):
        check_shape(name, pool, None, kv_heads, head_dim)
    for name, tensor in (("k", k), ("v", v), ("v_pool", v_pool), ("open_keys", open_keys)):
        check_inner_contiguous(name, tensor)
        check_dtype(name, tensor, v_pool.dtype)
    check_shape("pool_slots", pool_slots, tokens)
    check_dtype("pool_slots", pool_slots, torch.int64)
    check_shape("open_slots", open_slots, tokens)
    check_dtype("open_slots", open_slots, torch.int32)
    if tokens == 0:
        return
    if not use_triton(impl, k):
        split_store_reference(k, v, pool_slots, open_slots, v_pool=v_pool, open_keys=open_keys)
        return
    _split_store_kernel[(triton.cdiv(tokens, TOKENS), kv_heads)](
        k,
        v,
        pool_slots,
        open_slots,
        v_pool,
        open_keys,
        tokens,
        *k.stride()[:2],
        *v.stride()[:2],
        *v_pool.stride()[:2],
        *open_keys.stride()[:2],
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        TOKENS=TOKENS,
        num_warps=4,
    )
