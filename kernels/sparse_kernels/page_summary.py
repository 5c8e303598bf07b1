"""Thumbnails of closed pages' keys and mean values of their cells, in one launch.

A decode step makes both in every layer, mostly of no page at all: then a launch is all that it costs.
"""

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
from .block_statistics import CHANNELS, block_statistics_reference, write_statistics
from .thumbnail import BITS, check_thumbnails, code_widths, thumbnail_reference, write_thumbnail


def page_summary_reference(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    bits: int,
    page_size: int,
    cell: int,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    means: torch.Tensor,
    symmetric: bool = False,
    targets: torch.Tensor | None = None,
) -> None:
    """Torch reference of `page_summary`."""
    thumbnail_reference(
        k_pool,
        pages,
        bits=bits,
        page_size=page_size,
        codes=codes,
        low_step=low_step,
        symmetric=symmetric,
        targets=targets,
    )
    out = means.unsqueeze(3)
    block_statistics_reference(
        v_pool, pages, kind="mean", page_size=page_size, block_size=cell, out=out, targets=targets
    )


@triton.jit
def _page_summary_kernel(
    k_pool,
    v_pool,
    pages,
    targets,
    codes,
    low_step,
    means,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    kv_heads,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    CELL: tl.constexpr,
    WIDTH: tl.constexpr,
    PLANE_WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    h = tl.program_id(1)
    if page >= 0:
        target = tl.load(targets + tl.program_id(0)).to(tl.int64)
        if tl.program_id(2) == 0:
            write_thumbnail(
                k_pool,
                page,
                target,
                h,
                codes,
                low_step,
                k_slot_stride,
                k_head_stride,
                kv_heads,
                BITS,
                SYMMETRIC,
                D,
                PAGE,
                WIDTH,
                PLANE_WIDTH,
            )
        else:
            write_statistics(
                v_pool,
                page,
                target,
                h,
                means,
                v_slot_stride,
                v_head_stride,
                kv_heads,
                "mean",
                1,
                D,
                PAGE,
                CELL,
                CHANNELS,
            )


def page_summary(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    bits: int,
    page_size: int,
    cell: int,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    means: torch.Tensor,
    symmetric: bool = False,
    targets: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """What `thumbnail` writes of `k_pool` and `block_statistics` (kind `mean`) of `v_pool`, for the same pages.

    Args:
        k_pool, v_pool: `[P * page_size, Hkv, D]` fp16, bf16 or fp32.
        pages: `[n]` int32 or int64, physical pages; negative entries are skipped.
        bits: 2, 3 or 4.
        page_size: tokens in a page.
        cell: tokens that share a mean; divides `page_size`.
        codes: `[P, Hkv, page_size, D * bits // 8]` uint8, contiguous, see `thumbnail`.
        low_step: `[P, Hkv, 2, D]` bfloat16, contiguous, see `thumbnail`.
        means: `[P, Hkv, page_size // cell, D]`, the pool's dtype, contiguous.
        symmetric: see `thumbnail`.
        targets: `[n]` int32 or int64, the pages of the outputs to write, where they are not those of the pools; the
            outputs then have any number of pages. Not read where `pages` is negative.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_choice("bits", bits, BITS)
    check_sizes(page_size, cell)
    check_pool("k_pool", k_pool, page_size)
    check_pool("v_pool", v_pool, page_size)
    check_shape("v_pool", v_pool, *k_pool.shape)
    check_dtype("v_pool", v_pool, k_pool.dtype)
    check_rows("pages", pages, 0)
    check_dtype("pages", pages, torch.int32, torch.int64)
    check_targets(targets, pages)
    check_thumbnails(codes, low_step, k_pool, bits, page_size, None if targets is None else codes.shape[0])
    slots, kv_heads, head_dim = k_pool.shape
    summaries = slots // page_size if targets is None else codes.shape[0]
    check_shape("means", means, summaries, kv_heads, page_size // cell, head_dim)
    check_dtype("means", means, k_pool.dtype)
    check_contiguous("means", means)
    if not use_triton(impl, k_pool):
        page_summary_reference(
            k_pool,
            v_pool,
            pages,
            bits=bits,
            page_size=page_size,
            cell=cell,
            codes=codes,
            low_step=low_step,
            means=means,
            symmetric=symmetric,
            targets=targets,
        )
        return
    if pages.shape[0] == 0:
        return
    _page_summary_kernel[(pages.shape[0], kv_heads, 2)](
        k_pool,
        v_pool,
        pages,
        pages if targets is None else targets,
        codes,
        low_step.view(torch.int16),
        means,
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        kv_heads,
        BITS=bits,
        SYMMETRIC=symmetric,
        D=head_dim,
        PAGE=page_size,
        CELL=cell,
        CHANNELS=CHANNELS,
        **code_widths(head_dim, bits),
        num_warps=8 if page_size * head_dim > 8192 else 4,
    )
