"""Summaries of closed pages: mean, mean and variance, or minimum and maximum of each block's keys, by channel."""

import torch
import triton
import triton.language as tl

from ._checks import (
    check_choice,
    check_contiguous,
    check_dtype,
    check_pool,
    check_rows,
    check_shape,
    check_sizes,
    check_targets,
)
from ._dispatch import use_triton

KINDS = ("mean", "mean-variance", "minmax")
STATISTICS_OF_KIND = {"mean": 1, "mean-variance": 2, "minmax": 2}
"""`S`, the number of statistics kept for each block."""

CHANNELS = 64
"""Channels that a program reads at a time."""


def block_statistics_reference(
    k_pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    kind: str,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    targets: torch.Tensor | None = None,
) -> None:
    """Torch reference of `block_statistics`."""
    targets = (pages if targets is None else targets)[pages >= 0].long()
    pages = pages[pages >= 0].long()
    if pages.numel() == 0:
        return
    _, kv_heads, head_dim = k_pool.shape
    slots = pages[:, None] * page_size + torch.arange(page_size, device=pages.device)
    keys = k_pool[slots.flatten()].float().view(len(pages), page_size // block_size, block_size, kv_heads, head_dim)
    if kind == "minmax":
        statistics = [keys.amin(2), keys.amax(2)]
    else:
        mean = keys.mean(2)
        statistics = [mean] if kind == "mean" else [mean, keys.var(2, unbiased=False)]
    out[targets] = torch.stack(statistics, 2).permute(0, 3, 1, 2, 4).to(out.dtype)


@triton.jit
def write_statistics(
    k_pool,
    page,
    target_page,
    h,
    out,
    slot_stride,
    head_stride,
    kv_heads,
    KIND: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Writes the statistics of one head of `page` (int64) to those of `target_page` (int64)."""
    BLOCKS: tl.constexpr = PAGE // BLOCK
    tokens = tl.arange(0, PAGE)
    blocks = tl.arange(0, BLOCKS)
    keys = k_pool + (page * PAGE + tokens[:, None]) * slot_stride + h * head_stride
    target = out + ((target_page * kv_heads + h) * BLOCKS + blocks[:, None]) * (S * D)
    for start in tl.static_range(0, D, CHANNELS):
        channels = start + tl.arange(0, CHANNELS)[None, :]
        real = channels < D
        tile = tl.load(keys + channels, mask=real, other=0.0).to(tl.float32)
        tile = tl.reshape(tile, (BLOCKS, BLOCK, CHANNELS))
        if KIND == "minmax":
            first = tl.min(tile, 1)
            second = tl.max(tile, 1)
        else:
            first = tl.sum(tile, 1) / BLOCK
            deviation = tile - first[:, None, :]
            second = tl.sum(deviation * deviation, 1) / BLOCK
        tl.store(target + channels, first.to(out.dtype.element_ty), mask=real)
        if S == 2:
            tl.store(target + D + channels, second.to(out.dtype.element_ty), mask=real)


@triton.jit
def _block_statistics_kernel(
    k_pool,
    pages,
    targets,
    out,
    slot_stride,
    head_stride,
    kv_heads,
    KIND: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    if page >= 0:
        write_statistics(
            k_pool,
            page,
            tl.load(targets + tl.program_id(0)).to(tl.int64),
            tl.program_id(1),
            out,
            slot_stride,
            head_stride,
            kv_heads,
            KIND,
            S,
            D,
            PAGE,
            BLOCK,
            CHANNELS,
        )


def _block_statistics_triton(
    k_pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    kind: str,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    targets: torch.Tensor | None,
) -> None:
    if pages.shape[0] == 0:
        return
    _, kv_heads, head_dim = k_pool.shape
    _block_statistics_kernel[(pages.shape[0], kv_heads)](
        k_pool,
        pages,
        pages if targets is None else targets,
        out,
        k_pool.stride(0),
        k_pool.stride(1),
        kv_heads,
        KIND=kind,
        S=STATISTICS_OF_KIND[kind],
        D=head_dim,
        PAGE=page_size,
        BLOCK=block_size,
        CHANNELS=CHANNELS,
        num_warps=4,
    )


def block_statistics(
    k_pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    kind: str,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    targets: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Writes the block statistics of the given physical pages; all their tokens must be in the pool.

    Args:
        k_pool: `[P * page_size, Hkv, D]` fp16, bf16 or fp32.
        pages: `[n]` int32 or int64, physical pages; negative entries are skipped.
        kind: `mean` (S=1), `mean-variance` (S=2: mean, population variance) or `minmax` (S=2: minimum, maximum).
        page_size: tokens in a page.
        block_size: tokens in a block; divides `page_size`.
        out: `[P, Hkv, page_size // block_size, S, D]`, the pool's dtype, contiguous. Computed in fp32, then rounded.
        targets: `[n]` int32 or int64, the pages of `out` to write, where they are not those of the pool; `out` then has
            any number of pages. Not read where `pages` is negative.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype, size or kind is not as above.
    """
    check_choice("kind", kind, KINDS)
    check_sizes(page_size, block_size)
    check_pool("k_pool", k_pool, page_size)
    check_rows("pages", pages, 0)
    check_dtype("pages", pages, torch.int32, torch.int64)
    slots, kv_heads, head_dim = k_pool.shape
    check_targets(targets, pages)
    summaries = slots // page_size if targets is None else None
    check_shape("out", out, summaries, kv_heads, page_size // block_size, STATISTICS_OF_KIND[kind], head_dim)
    check_dtype("out", out, k_pool.dtype)
    check_contiguous("out", out)
    run = _block_statistics_triton if use_triton(impl, k_pool) else block_statistics_reference
    run(k_pool, pages, kind=kind, page_size=page_size, block_size=block_size, out=out, targets=targets)
