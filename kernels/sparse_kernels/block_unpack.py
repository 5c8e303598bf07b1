"""Copies listed float8 blocks from pinned host memory, and decodes them on their way into slots or a staging."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _float8_bits as float8
from ._checks import KV_DTYPES, check_contiguous, check_dtype, check_shape
from ._dispatch import use_triton
from .block_gather import MAX_PROGRAMS
from .host_block import PACKED, packed_bytes, unpack_blocks

ROWS = 128
"""Keys and values that a program has in flight: 16 KiB of head dim 128, twice as many numbers as `block_gather`."""


@triton.jit
def _block_unpack_kernel(
    source,
    target,
    source_index,
    target_index,
    count,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    VECTORS: tl.constexpr,
    ROWS: tl.constexpr,
):
    ITEMS: tl.constexpr = ROWS // VECTORS
    total = tl.load(count)
    row = tl.arange(0, ROWS)
    vector = row % VECTORS
    channel = tl.arange(0, HEAD_DIM_PAD)[None, :]
    for first in range(tl.program_id(0) * ITEMS, total, tl.num_programs(0) * ITEMS):
        item = first + row // VECTORS
        inside = item < total
        come_from = tl.load(source_index + item, mask=inside, other=0).to(tl.int64)
        go_to = tl.load(target_index + item, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & (channel < HEAD_DIM)
        block = source + come_from * (VECTORS * (HEAD_DIM + 1))
        codes = tl.load((block + vector * HEAD_DIM)[:, None] + channel, mask=mask, other=0, cache_modifier=".cg")
        # Every warp asks for its vectors' scales, which lie in one sector: by way of the L1, which is to fetch it once.
        scales = tl.load(block + VECTORS * HEAD_DIM + vector, mask=inside, other=1)
        values = float8.decode(codes, scales.to(tl.int32)[:, None])
        place = target + ((go_to * VECTORS + vector) * HEAD_DIM)[:, None] + channel
        tl.store(place, values.to(target.dtype.element_ty), mask=mask)


def block_unpack(
    source: torch.Tensor,
    target: torch.Tensor,
    source_index: torch.Tensor,
    target_index: torch.Tensor,
    count: torch.Tensor,
    *,
    programs: int = MAX_PROGRAMS,
    impl: str = "auto",
) -> None:
    """`block_gather` of float8 blocks: `target[target_index[i]] = unpack(source[source_index[i]])` for `i < count`.

    Args:
        source: `[n, 2 * block * (D + 1)]` uint8, contiguous (`host_block`); on the GPU or in pinned host memory.
        target: `[m, 2, block, D]` fp16, bf16 or fp32, contiguous.
        source_index, target_index, count, programs, impl: as in `block_gather`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_shape("target", target, None, 2, None, None)
    check_dtype("target", target, *KV_DTYPES)
    check_contiguous("target", target)
    _, _, block_size, head_dim = target.shape
    check_shape("source", source, None, packed_bytes(block_size, head_dim))
    check_dtype("source", source, PACKED)
    check_contiguous("source", source)
    for name, index in (("source_index", source_index), ("target_index", target_index)):
        check_shape(name, index, None)
        check_dtype(name, index, torch.int32)
        check_contiguous(name, index)
    check_shape("count", count, 1)
    check_dtype("count", count, torch.int32)
    if programs < 1:
        raise ValueError(f"programs is {programs}; needed: at least 1")
    if not len(source) or not len(target):
        return
    if not use_triton(impl, target):
        block_unpack_reference(source, target, source_index, target_index, count)
        return
    _block_unpack_kernel[(programs,)](
        source,
        target,
        source_index,
        target_index,
        count,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        VECTORS=2 * block_size,
        ROWS=max(ROWS, 2 * block_size),
        num_warps=8,
    )


def block_unpack_reference(
    source: torch.Tensor,
    target: torch.Tensor,
    source_index: torch.Tensor,
    target_index: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """`block_unpack` in plain torch."""
    n = int(count)
    packed = source[source_index[:n].long().to(source.device)]
    target[target_index[:n].long()] = unpack_blocks(packed, target.shape[2], target.dtype).to(target.device)
