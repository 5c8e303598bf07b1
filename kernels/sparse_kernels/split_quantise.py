"""Splits the keys of pages that are full into codes, bounds and residuals (`split_keys`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import PAGE_SIZES, check_choice, check_dtype, check_pool, check_rows, check_targets
from ._dispatch import use_triton
from .split_keys import CODE_BITS, UNITS, ZERO, check_split_pages
from .thumbnail import pack_codes, quantise, quantise_tile

_UNITS: tl.constexpr = tl.constexpr(UNITS)
_ZERO: tl.constexpr = tl.constexpr(ZERO)


def split_quantise_reference(
    k_pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    page_size: int,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    residual: torch.Tensor,
    targets: torch.Tensor | None = None,
) -> None:
    """Torch reference of `split_quantise`."""
    targets = (pages if targets is None else targets)[pages >= 0].long()
    pages = pages[pages >= 0].long()
    if pages.numel() == 0:
        return
    slots = pages[:, None] * page_size + torch.arange(page_size, device=pages.device)
    keys = k_pool[slots.flatten()].float().view(len(pages), page_size, *k_pool.shape[1:])
    levels, low, step, ratio = quantise(keys, CODE_BITS)
    rest = ((ratio - levels.float()) * UNITS + 0.5).floor() + ZERO
    codes[targets] = pack_codes(levels, CODE_BITS).transpose(1, 2)
    low_step[targets] = torch.stack((low, step), 2)
    residual[targets] = rest.clamp(0, 255).to(torch.uint8).transpose(1, 2)


@triton.jit
def _split_quantise_kernel(
    k_pool,
    pages,
    targets,
    codes,
    low_step,
    residual,
    slot_stride,
    head_stride,
    kv_heads,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    h = tl.program_id(1)
    BYTES: tl.constexpr = D // 4
    if page >= 0:
        tokens = tl.arange(0, PAGE)[:, None]
        keys = k_pool + (page * PAGE + tokens) * slot_stride + h * head_stride
        summary = tl.load(targets + tl.program_id(0)).to(tl.int64) * kv_heads + h
        bounds = low_step + summary * (2 * D)
        rests = residual + (summary * PAGE + tokens) * D
        column = tl.arange(0, WIDTH)
        real = column < BYTES
        packed = tl.zeros((PAGE, WIDTH), tl.int32)
        for s in range(4):
            channels = s * BYTES + column
            tile = tl.load(keys + channels[None, :], mask=real[None, :], other=0.0).to(tl.float32)
            levels, low_bits, step_bits, ratio = quantise_tile(tile, 3, False)
            packed |= levels << (2 * s)
            rest = tl.floor((ratio - levels.to(tl.float32)) * _UNITS + 0.5) + _ZERO
            rest = tl.minimum(tl.maximum(rest, 0.0), 255.0).to(tl.int32).to(tl.uint8)
            tl.store(rests + channels[None, :], rest, mask=real[None, :])
            tl.store(bounds + channels, low_bits.to(tl.int16), mask=real)
            tl.store(bounds + D + channels, step_bits.to(tl.int16), mask=real)
        target = codes + (summary * PAGE + tokens) * BYTES
        tl.store(target + column[None, :], packed.to(tl.uint8), mask=real[None, :])


def split_quantise(
    k_pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    page_size: int,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    residual: torch.Tensor,
    targets: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Splits the keys of the given physical pages, all of whose tokens must be in the pool.

    Codes, low and step are those of `thumbnail` with two bits, bit for bit. With `t = (k - low) / step` the residual's
    byte is `floor(256 * (t - code) + 0.5) + 128`, at most 255: keys are at most half a unit of `step / 256` off, or a
    whole one where `t - code` rounds to its upper end. A channel of step 0 is its low, exactly.

    Args:
        k_pool: `[slots, Hkv, D]` fp16, bf16 or fp32, a multiple of `page_size` slots.
        pages: `[n]` int32 or int64, pages of the pool; negative entries are skipped.
        page_size: tokens in a page.
        codes, low_step, residual: as in `SplitKeys`, written.
        targets: `[n]` int32 or int64, the pages to write, where they are not those of the pool. Not read where `pages`
            is negative.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_choice("page_size", page_size, PAGE_SIZES)
    check_pool("k_pool", k_pool, page_size)
    check_rows("pages", pages, 0)
    check_dtype("pages", pages, torch.int32, torch.int64)
    check_targets(targets, pages)
    _, kv_heads, head_dim = k_pool.shape
    check_split_pages(codes, low_step, residual, page_size, kv_heads, head_dim)
    if not use_triton(impl, k_pool):
        split_quantise_reference(
            k_pool, pages, page_size=page_size, codes=codes, low_step=low_step, residual=residual, targets=targets
        )
        return
    if pages.shape[0] == 0:
        return
    _split_quantise_kernel[(pages.shape[0], kv_heads)](
        k_pool,
        pages,
        pages if targets is None else targets,
        codes,
        low_step.view(torch.int16),
        residual,
        k_pool.stride(0),
        k_pool.stride(1),
        kv_heads,
        D=head_dim,
        PAGE=page_size,
        WIDTH=triton.next_power_of_2(head_dim // 4),
        num_warps=8 if page_size * head_dim > 8192 else 4,
    )
