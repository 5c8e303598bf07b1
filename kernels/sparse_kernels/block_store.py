"""Writes new keys and values through to the host pool, and those of open pages to where they stay on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _float8_bits as float8
from ._checks import check_contiguous, check_dtype, check_inner_contiguous, check_shape
from ._dispatch import use_triton
from .host_block import PACKED, check_host_layer, pack_blocks
from .slot_maps import NO_SLOT

TOKENS = 16
"""Tokens that a program stores of one head: a block of them is one piece of host memory."""

_NO_SLOT: tl.constexpr = tl.constexpr(NO_SLOT)


# Chunks of prefill differ in length: one kernel serves them all, so that none waits for the compiler.
@triton.jit(do_not_specialize=["tokens"])
def _block_store_kernel(
    k_ptr,
    v_ptr,
    pool_slots,
    open_slots,
    slot_map,
    host,
    open_k,
    open_v,
    tokens,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    open_stride_t,
    open_stride_h,
    pool_blocks,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    BLOCKS_PER_PAGE: tl.constexpr = PAGE // BLOCK
    h = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.load(pool_slots + token, mask=token < tokens, other=-1)
    stored = place >= 0
    page = tl.where(stored, place // PAGE, 0)
    inner = tl.where(stored, place % PAGE, 0)
    block = page * BLOCKS_PER_PAGE + inner // BLOCK
    begins = stored & (inner == 0)
    for i in tl.static_range(BLOCKS_PER_PAGE):
        tl.store(slot_map + h * pool_blocks + block + i, tl.full((TOKENS,), _NO_SLOT, tl.int32), mask=begins)

    channel = tl.arange(0, HEAD_DIM_PAD)[None, :]
    mask = stored[:, None] & (channel < HEAD_DIM)
    token = token.to(tl.int64)[:, None]
    k = tl.load(k_ptr + token * k_stride_t + h * k_stride_h + channel, mask=mask)
    v = tl.load(v_ptr + token * v_stride_t + h * v_stride_h + channel, mask=mask)
    unit = (page * tl.num_programs(1) + h) * BLOCKS_PER_PAGE + inner // BLOCK
    BLOCK_SIZE: tl.constexpr = 2 * BLOCK * (HEAD_DIM + 1 if FLOAT8 else HEAD_DIM)
    to_host = host + (unit * BLOCK_SIZE + inner % BLOCK * HEAD_DIM)[:, None] + channel
    if FLOAT8:
        to_scale = host + unit * BLOCK_SIZE + 2 * BLOCK * HEAD_DIM + inner % BLOCK
        k32 = tl.where(mask, k, 0.0).to(tl.float32)
        v32 = tl.where(mask, v, 0.0).to(tl.float32)
        k_scale = float8.scale_bits(tl.max(tl.abs(k32), 1))
        v_scale = float8.scale_bits(tl.max(tl.abs(v32), 1))
        tl.store(to_host, float8.encode(k32, k_scale[:, None]), mask=mask)
        tl.store(to_host + BLOCK * HEAD_DIM, float8.encode(v32, v_scale[:, None]), mask=mask)
        tl.store(to_scale, k_scale.to(tl.uint8), mask=stored)
        tl.store(to_scale + BLOCK, v_scale.to(tl.uint8), mask=stored)
    else:
        tl.store(to_host, k, mask=mask)
        tl.store(to_host + BLOCK * HEAD_DIM, v, mask=mask)

    opened = tl.load(open_slots + tl.reshape(token, (TOKENS,)), mask=stored, other=-1).to(tl.int64)
    mask = mask & (opened >= 0)[:, None]
    to_open = opened[:, None] * open_stride_t + h * open_stride_h + channel
    tl.store(open_k + to_open, k, mask=mask)
    tl.store(open_v + to_open, v, mask=mask)


def check_open_pages(open_k: torch.Tensor, open_v: torch.Tensor, page_size: int, kv_heads: int, head_dim: int) -> None:
    """Raises ValueError unless both are `[rows * page_size, Hkv, D]`."""
    for name, pool in (("open_k", open_k), ("open_v", open_v)):
        check_shape(name, pool, None, kv_heads, head_dim)
        check_contiguous(name, pool)
    check_shape("open_v", open_v, *open_k.shape)
    if open_k.shape[0] % page_size:
        raise ValueError(f"open_k has {open_k.shape[0]} tokens; needed: a multiple of page_size={page_size}")


def block_store(
    k: torch.Tensor,
    v: torch.Tensor,
    pool_slots: torch.Tensor,
    open_slots: torch.Tensor,
    slot_map: torch.Tensor,
    *,
    host: torch.Tensor,
    open_k: torch.Tensor,
    open_v: torch.Tensor,
    page_size: int,
    block_size: int,
    impl: str = "auto",
) -> None:
    """Stores the keys and values of `T` tokens of one layer: a decode step's, or a chunk of prefill.

    The token that is the first of its page takes all the page's blocks out of the cache: what was there belongs to an
    earlier use of the page.

    Args:
        k, v: `[T, Hkv, D]` on the device, last dimension contiguous.
        pool_slots: `[T]` int64, places in the pool (`page * page_size + offset`); negative ones are skipped, as padded
            rows of a batch are.
        open_slots: `[T]` int32, places in `open_k` and `open_v`; negative for tokens of other pages than a request's
            last.
        slot_map: `[Hkv, P * blocks_per_page]` int32, the layer's.
        host: `[P, Hkv, blocks_per_page, 2, block_size, D]` in k's dtype, one layer of the host pool, or one of float8
            blocks (`host_block`); a CUDA kernel needs it pinned.
        open_k, open_v: `[rows * page_size, Hkv, D]` in k's dtype, the pages that requests are writing.
        page_size, block_size: tokens.
        impl: `auto` (Triton where `k` is on a GPU), `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_shape("k", k, None, None, None)
    tokens, kv_heads, head_dim = k.shape
    check_shape("v", v, tokens, kv_heads, head_dim)
    check_inner_contiguous("k", k)
    check_inner_contiguous("v", v)
    check_host_layer(host, page_size, block_size, kv_heads, head_dim)
    check_open_pages(open_k, open_v, page_size, kv_heads, head_dim)
    check_dtype("host", host, k.dtype, PACKED)
    for name, tensor in (("v", v), ("open_k", open_k), ("open_v", open_v)):
        check_dtype(name, tensor, k.dtype)
    check_shape("pool_slots", pool_slots, tokens)
    check_dtype("pool_slots", pool_slots, torch.int64)
    check_shape("open_slots", open_slots, tokens)
    check_dtype("open_slots", open_slots, torch.int32)
    check_shape("slot_map", slot_map, kv_heads, host.shape[0] * host.shape[2])
    check_dtype("slot_map", slot_map, torch.int32)
    check_contiguous("slot_map", slot_map)
    if tokens == 0:
        return
    if not use_triton(impl, k):
        block_store_reference(
            k,
            v,
            pool_slots,
            open_slots,
            slot_map,
            host=host,
            open_k=open_k,
            open_v=open_v,
            page_size=page_size,
            block_size=block_size,
        )
        return
    _block_store_kernel[(triton.cdiv(tokens, TOKENS), kv_heads)](
        k,
        v,
        pool_slots,
        open_slots,
        slot_map,
        host,
        open_k,
        open_v,
        tokens,
        *k.stride()[:2],
        *v.stride()[:2],
        *open_k.stride()[:2],
        slot_map.shape[1],
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        PAGE=page_size,
        BLOCK=block_size,
        TOKENS=TOKENS,
        FLOAT8=host.dtype == PACKED,
        num_warps=4,
    )


def block_store_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    pool_slots: torch.Tensor,
    open_slots: torch.Tensor,
    slot_map: torch.Tensor,
    *,
    host: torch.Tensor,
    open_k: torch.Tensor,
    open_v: torch.Tensor,
    page_size: int,
    block_size: int,
) -> None:
    """`block_store` in plain torch."""
    per_page = host.shape[2]
    stored = pool_slots >= 0
    place = pool_slots[stored]
    page, inner = place // page_size, place % page_size
    begun = page[inner == 0]
    slot_map.view(slot_map.shape[0], -1, per_page)[:, begun] = NO_SLOT
    where = (page.to(host.device), slice(None), (inner // block_size).to(host.device))
    offset = (inner % block_size).to(host.device)
    for kind, new in enumerate((k[stored].to(host.device), v[stored].to(host.device))):
        if host.dtype == PACKED:
            # Packed as blocks of one token, of which the codes are followed by the key's and the value's exponent.
            dim = k.shape[2]
            packed = pack_blocks(torch.stack((new, new), -2)[..., None, :])
            codes = host[..., : 2 * block_size * dim].unflatten(-1, (2, block_size, dim))
            codes[(*where, kind, offset)] = packed[..., :dim]
            host[..., 2 * block_size * dim :].unflatten(-1, (2, block_size))[(*where, kind, offset)] = packed[..., -1]
        else:
            host[(*where, kind, offset)] = new
    opened = stored & (open_slots >= 0)
    open_k[open_slots[opened].long()] = k[opened]
    open_v[open_slots[opened].long()] = v[opened]
