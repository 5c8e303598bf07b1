"""Thumbnails: low-bit codes of the keys of closed pages.

A key channel is approximated by `low + code * step`, with `low` and `step` of its page and KV head. Asymmetric codes
keep keys with large constant biases apart, where symmetric ones (FFD's) spend their levels on the bias. What reads
thumbnails does not tell them apart.
"""

import torch
import triton
import triton.language as tl

from . import _bfloat16_bits as bfloat16_bits
from ._checks import (
    PAGE_SIZES,
    check_choice,
    check_contiguous,
    check_dtype,
    check_pool,
    check_rows,
    check_shape,
    check_targets,
)
from ._dispatch import use_triton

BITS = (2, 3, 4)


def _floor_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Largest bfloat16 that is not above `x`; int32 arithmetic on the bits, so that every device agrees."""
    bits = x.contiguous().view(torch.int32)
    inexact = (bits & 0xFFFF) != 0
    truncated = (bits >> 16) + ((bits < 0) & inexact).to(torch.int32)
    return (truncated << 16).view(torch.float32).to(torch.bfloat16)


def _ceil_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Smallest bfloat16 that is not below `x`, for `x >= 0`."""
    bits = x.contiguous().view(torch.int32)
    return (((bits + 0xFFFF) >> 16) << 16).view(torch.float32).to(torch.bfloat16)


def quantise(
    keys: torch.Tensor, bits: int, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of fp32 keys `[n, page_size, Hkv, D]` in plain torch.

    Returns:
        Codes (uint8, shaped as the keys), low and step `[n, Hkv, D]` bfloat16, and `(k - low) / step`, fp32, shaped as
        the keys and 0 where the step is.
    """
    levels = 2**bits - 1
    high = keys.abs().amax(1) if symmetric else keys.amax(1)
    # 0 - high, so that a channel of zeros has the same bits as in the kernel.
    low = _floor_to_bfloat16(0.0 - high if symmetric else keys.amin(1))
    low32 = low.float()
    # Not divided by the number itself: on CUDA torch would multiply by its rounded reciprocal.
    step = _ceil_to_bfloat16((high - low32) / torch.full_like(high, levels))
    # The subtraction and the division round: where the bound still fails, one bfloat16 further up.
    short = (low32 + levels * step.float() < high).to(torch.int16)
    step = (step.view(torch.int16) + short).view(torch.bfloat16)
    step32 = step.float()
    ratio = (keys - low32[:, None]) / torch.where(step32 > 0, step32, 1.0)[:, None]
    ratio = torch.where((step32 > 0)[:, None], ratio, 0.0)
    return (ratio + 0.5).floor().clamp(0, levels).to(torch.uint8), low, step, ratio


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes `[..., D]` into `[..., D * bits // 8]`; see `unpack_codes`."""

    def plane(values: torch.Tensor, width: int) -> torch.Tensor:
        parts = values.unflatten(-1, (8 // width, -1))
        packed = parts.select(-2, 0).clone()
        for s in range(1, 8 // width):
            packed |= parts.select(-2, s) << (s * width)
        return packed

    if bits == 3:
        return torch.cat((plane(codes & 3, 2), plane(codes >> 2, 1)), -1)
    return plane(codes, bits)


def unpack_codes(codes: torch.Tensor, bits: int, head_dim: int) -> torch.Tensor:
    """Unpacks thumbnail codes.

    With `w` bits a plane, byte `i` of a plane holds channels `i + s * D * w / 8`, at bits `s * w` and up, for all s
    below `8 / w`. Two and four bits are one plane; three bits are a plane of the low two bits, then one of the high.

    Args:
        codes: `[..., D * bits // 8]` uint8.
        bits: 2, 3 or 4.
        head_dim: `D`.

    Returns:
        `[..., D]` uint8, values 0 to `2**bits - 1`.
    """

    def plane(packed: torch.Tensor, width: int) -> torch.Tensor:
        return torch.cat([(packed >> (s * width)) & (2**width - 1) for s in range(8 // width)], -1)

    if bits == 3:
        low, high = codes.split((head_dim // 4, head_dim // 8), -1)
        return plane(low, 2) | (plane(high, 1) << 2)
    return plane(codes, bits)


def thumbnail_reference(
    k_pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    bits: int,
    page_size: int,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    symmetric: bool = False,
    targets: torch.Tensor | None = None,
) -> None:
    """Torch reference of `thumbnail`."""
    targets = (pages if targets is None else targets)[pages >= 0].long()
    pages = pages[pages >= 0].long()
    if pages.numel() == 0:
        return
    slots = pages[:, None] * page_size + torch.arange(page_size, device=pages.device)
    keys = k_pool[slots.flatten()].float().view(len(pages), page_size, *k_pool.shape[1:])
    quantised, low, step, _ = quantise(keys, bits, symmetric)
    codes[targets] = pack_codes(quantised, bits).transpose(1, 2)
    low_step[targets] = torch.stack((low, step), 2)


@triton.jit
def quantise_tile(keys, LEVELS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Codes (int32, `[T, W]`), bit patterns of low and step (`[W]`) and `(k - low) / step` of fp32 keys `[T, W]`."""
    if SYMMETRIC:
        high = tl.max(tl.abs(keys), 0)
        low_bits = bfloat16_bits.floor_bits(0.0 - high)
    else:
        high = tl.max(keys, 0)
        low_bits = bfloat16_bits.floor_bits(tl.min(keys, 0))
    low = bfloat16_bits.to_float(low_bits)
    span = high - low
    step_bits = bfloat16_bits.ceil_bits(tl.div_rn(span, tl.full(span.shape, LEVELS, tl.float32)))
    # The subtraction and the division round: where the bound still fails, one bfloat16 further up.
    step_bits += (low + LEVELS * bfloat16_bits.to_float(step_bits) < high).to(tl.int32)
    step = bfloat16_bits.to_float(step_bits)[None, :]
    ratio = tl.div_rn(keys - low[None, :], tl.where(step > 0, step, 1.0) + tl.zeros_like(keys))
    ratio = tl.where(step > 0, ratio, 0.0)
    codes = tl.minimum(tl.maximum(tl.floor(ratio + 0.5), 0.0), LEVELS).to(tl.int32)
    return codes, low_bits, step_bits, ratio


@triton.jit
def write_thumbnail(
    k_pool,
    page,
    target_page,
    h,
    codes,
    low_step,
    slot_stride,
    head_stride,
    kv_heads,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    PLANE_WIDTH: tl.constexpr,
):
    """Writes the thumbnail of one head of `page` (int64) to that of `target_page` (int64)."""
    LEVELS: tl.constexpr = 2**BITS - 1
    LOW_BITS: tl.constexpr = 4 if BITS == 4 else 2
    BYTES: tl.constexpr = D * LOW_BITS // 8
    tokens = tl.arange(0, PAGE)[:, None]
    keys = k_pool + (page * PAGE + tokens) * slot_stride + h * head_stride
    summary = target_page * kv_heads + h
    target = codes + (summary * PAGE + tokens) * (D * BITS // 8)
    bounds = low_step + summary * (2 * D)
    column = tl.arange(0, WIDTH)
    packed = tl.zeros((PAGE, WIDTH), tl.int32)
    for s in tl.static_range(8 // LOW_BITS):
        channels = s * BYTES + column
        tile = tl.load(keys + channels[None, :], mask=column[None, :] < BYTES, other=0.0).to(tl.float32)
        tile_codes, low_bits, step_bits, _ = quantise_tile(tile, LEVELS, SYMMETRIC)
        packed |= (tile_codes & (2**LOW_BITS - 1)) << (s * LOW_BITS)
        tl.store(bounds + channels, low_bits.to(tl.int16), mask=column < BYTES)
        tl.store(bounds + D + channels, step_bits.to(tl.int16), mask=column < BYTES)
    tl.store(target + column[None, :], packed.to(tl.uint8), mask=column[None, :] < BYTES)
    if BITS == 3:
        # The plane of the high bit divides the channels otherwise; its codes are computed anew.
        bit_column = tl.arange(0, PLANE_WIDTH)[None, :]
        bits = tl.zeros((PAGE, PLANE_WIDTH), tl.int32)
        for s in range(8):
            bit_keys = tl.load(keys + s * (D // 8) + bit_column, mask=bit_column < D // 8, other=0.0).to(tl.float32)
            bit_codes = quantise_tile(bit_keys, LEVELS, SYMMETRIC)[0]
            bits |= (bit_codes >> 2) << s
        tl.store(target + D // 4 + bit_column, bits.to(tl.uint8), mask=bit_column < D // 8)


@triton.jit
def _thumbnail_kernel(
    k_pool,
    pages,
    targets,
    codes,
    low_step,
    slot_stride,
    head_stride,
    kv_heads,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    PLANE_WIDTH: tl.constexpr,
):
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    if page >= 0:
        write_thumbnail(
            k_pool,
            page,
            tl.load(targets + tl.program_id(0)).to(tl.int64),
            tl.program_id(1),
            codes,
            low_step,
            slot_stride,
            head_stride,
            kv_heads,
            BITS,
            SYMMETRIC,
            D,
            PAGE,
            WIDTH,
            PLANE_WIDTH,
        )


def code_widths(head_dim: int, bits: int) -> dict[str, int]:
    """Constants `WIDTH` and `PLANE_WIDTH` of `write_thumbnail`."""
    return {
        "WIDTH": triton.next_power_of_2(head_dim * (4 if bits == 4 else 2) // 8),
        "PLANE_WIDTH": triton.next_power_of_2(head_dim // 8),
    }


def _thumbnail_triton(
    k_pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    bits: int,
    page_size: int,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    symmetric: bool,
    targets: torch.Tensor | None,
) -> None:
    if pages.shape[0] == 0:
        return
    _, kv_heads, head_dim = k_pool.shape
    _thumbnail_kernel[(pages.shape[0], kv_heads)](
        k_pool,
        pages,
        pages if targets is None else targets,
        codes,
        low_step.view(torch.int16),
        k_pool.stride(0),
        k_pool.stride(1),
        kv_heads,
        BITS=bits,
        SYMMETRIC=symmetric,
        D=head_dim,
        PAGE=page_size,
        **code_widths(head_dim, bits),
        num_warps=8 if page_size * head_dim > 8192 else 4,
    )


def thumbnail(
    k_pool: torch.Tensor,
    pages: torch.Tensor,
    *,
    bits: int,
    page_size: int,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    symmetric: bool = False,
    targets: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Writes the thumbnails of the given physical pages; all their tokens must be in the pool.

    For each page, KV head and channel: `low` is the minimum rounded down to bfloat16, and `step` the smallest bfloat16
    with `low + n * step >= maximum`, where `n = 2**bits - 1`; `code = clamp(floor((k - low) / step + 0.5), 0, n)`.
    A constant channel that bfloat16 represents has step 0 and codes 0. Hence `low <= k <= low + n * step` in fp32 for
    every finite key. With `symmetric`, minimum and maximum are minus and plus the largest magnitude: for two bits FFD's
    levels, -1.5 s, -0.5 s, 0.5 s and 1.5 s with `s = max |k| / 1.5`, but for the rounding of low and step.

    Args:
        k_pool: `[P * page_size, Hkv, D]` fp16, bf16 or fp32.
        pages: `[n]` int32 or int64, physical pages; negative entries are skipped.
        bits: 2, 3 or 4.
        page_size: tokens in a page.
        codes: `[P, Hkv, page_size, D * bits // 8]` uint8, contiguous; packed as `unpack_codes` says.
        low_step: `[P, Hkv, 2, D]` bfloat16, contiguous: low, then step.
        symmetric: whether the range is made symmetric to zero.
        targets: `[n]` int32 or int64, the pages of `codes` and `low_step` to write, where they are not those of the
            pool; both then have any number of pages. Not read where `pages` is negative.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_choice("bits", bits, BITS)
    check_choice("page_size", page_size, PAGE_SIZES)
    check_pool("k_pool", k_pool, page_size)
    check_rows("pages", pages, 0)
    check_dtype("pages", pages, torch.int32, torch.int64)
    check_targets(targets, pages)
    check_thumbnails(codes, low_step, k_pool, bits, page_size, None if targets is None else codes.shape[0])
    run = _thumbnail_triton if use_triton(impl, k_pool) else thumbnail_reference
    run(
        k_pool,
        pages,
        bits=bits,
        page_size=page_size,
        codes=codes,
        low_step=low_step,
        symmetric=symmetric,
        targets=targets,
    )


def check_thumbnails(
    codes: torch.Tensor,
    low_step: torch.Tensor,
    k_pool: torch.Tensor,
    bits: int,
    page_size: int,
    pages: int | None = None,
) -> None:
    """Raises ValueError unless `codes` and `low_step` are thumbnails of this pool, or of as many `pages`."""
    slots, kv_heads, head_dim = k_pool.shape
    pages = slots // page_size if pages is None else pages
    check_shape("codes", codes, pages, kv_heads, page_size, head_dim * bits // 8)
    check_dtype("codes", codes, torch.uint8)
    check_contiguous("codes", codes)
    check_shape("low_step", low_step, pages, kv_heads, 2, head_dim)
    check_dtype("low_step", low_step, torch.bfloat16)
    check_contiguous("low_step", low_step)
