"""Copies listed blocks from one tensor to another, such as from pinned host memory to the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_contiguous, check_dtype, check_shape
from ._dispatch import use_triton

MAX_PROGRAMS = 32
"""Enough to fill PCIe 5.0 x16 with blocks of 8 KiB, and few enough to leave the other multiprocessors alone."""

ITEMS = 2
"""Blocks that a program has in flight."""


@triton.jit
def _block_gather_kernel(
    source,
    target,
    source_index,
    target_index,
    count,
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    ITEMS: tl.constexpr,
):
    total = tl.load(count)
    words = tl.arange(0, WORDS_PAD)
    for first in range(tl.program_id(0) * ITEMS, total, tl.num_programs(0) * ITEMS):
        item = first + tl.arange(0, ITEMS)
        come_from = tl.load(source_index + item, mask=item < total, other=0).to(tl.int64)
        go_to = tl.load(target_index + item, mask=item < total, other=0).to(tl.int64)
        mask = (item < total)[:, None] & (words < WORDS)[None, :]
        block = tl.load(source + come_from[:, None] * WORDS + words[None, :], mask=mask, cache_modifier=".cg")
        tl.store(target + go_to[:, None] * WORDS + words[None, :], block, mask=mask)


def block_gather(
    source: torch.Tensor,
    target: torch.Tensor,
    source_index: torch.Tensor,
    target_index: torch.Tensor,
    count: torch.Tensor,
    *,
    programs: int = MAX_PROGRAMS,
    impl: str = "auto",
) -> None:
    """`target[target_index[i]] = source[source_index[i]]` for `i < count`, blocks of any content.

    The grid does not depend on the count, which is read on the device, so that the call can be captured in a CUDA
    graph. A CUDA kernel reads pinned host memory by its own address: no copy engine and no host call is involved.

    Args:
        source: `[n, ...]`, contiguous, `n` blocks of a multiple of 16 bytes; on the GPU or in pinned host memory.
        target: `[m, ...]`, contiguous, blocks of the same shape and dtype.
        source_index, target_index: `[>=count]` int32; target indices are unique.
        count: `[1]` int32, on the device.
        programs: size of the grid.
        impl: `auto` (Triton where `target` is on a GPU), `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_contiguous("source", source)
    check_contiguous("target", target)
    check_shape("target", target, None, *source.shape[1:])
    check_dtype("target", target, source.dtype)
    size = source[:1].numel() * source.element_size() if len(source) else 0
    if size % 16:
        raise ValueError(f"source has blocks of {size} bytes; needed: a multiple of 16")
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
        block_gather_reference(source, target, source_index, target_index, count)
        return
    words = size // 4
    _block_gather_kernel[(programs,)](
        source.view(len(source), -1).view(torch.int32),
        target.view(len(target), -1).view(torch.int32),
        source_index,
        target_index,
        count,
        WORDS=words,
        WORDS_PAD=triton.next_power_of_2(words),
        ITEMS=ITEMS,
        num_warps=8,
    )


def block_gather_reference(
    source: torch.Tensor,
    target: torch.Tensor,
    source_index: torch.Tensor,
    target_index: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """`block_gather` in plain torch."""
    n = int(count)
    blocks = source[source_index[:n].long().to(source.device)]
    target[target_index[:n].long()] = blocks.to(target.device)
