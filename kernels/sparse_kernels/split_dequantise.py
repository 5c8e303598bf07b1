"""Keys of split pages put together again, for attention that reads whole keys, such as prefill's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _bfloat16_bits as bfloat16_bits
from ._checks import KV_DTYPES, PAGE_SIZES, check_choice, check_dtype, check_inner_contiguous, check_rows, check_shape
from ._dispatch import use_triton
from .split_keys import UNITS, ZERO, check_split_pages, reconstruct

_UNIT: tl.constexpr = tl.constexpr(1 / UNITS)
_UNITS: tl.constexpr = tl.constexpr(UNITS)
_ZERO: tl.constexpr = tl.constexpr(ZERO)


def split_dequantise_reference(
    codes: torch.Tensor,
    low_step: torch.Tensor,
    residual: torch.Tensor,
    pages: torch.Tensor,
    *,
    page_size: int,
    out: torch.Tensor,
) -> None:
    """Torch reference of `split_dequantise`."""
    chosen = pages.long()
    keys = reconstruct(codes[chosen], low_step[chosen], residual[chosen])
    out.unflatten(1, (len(chosen), page_size)).copy_(keys.transpose(0, 1))


@triton.jit
def _split_dequantise_kernel(
    codes,
    low_step,
    residual,
    pages,
    out,
    out_stride_h,
    out_stride_t,
    kv_heads,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    i = tl.program_id(0)
    h = tl.program_id(1)
    BYTES: tl.constexpr = D // 4
    summary = tl.load(pages + i).to(tl.int64) * kv_heads + h
    tokens = tl.arange(0, PAGE)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    real = column < BYTES
    packed = tl.load(codes + (summary * PAGE + tokens) * BYTES + column, mask=real, other=0).to(tl.int32)
    bounds = low_step + summary * (2 * D)
    rests = residual + (summary * PAGE + tokens) * D
    target = out + h.to(tl.int64) * out_stride_h + (i * PAGE + tokens).to(tl.int64) * out_stride_t
    for s in tl.static_range(4):
        channels = s * BYTES + column
        rest = tl.load(rests + channels, mask=real, other=0).to(tl.int32)
        low = bfloat16_bits.to_float(tl.load(bounds + channels, mask=real, other=0))
        step = bfloat16_bits.to_float(tl.load(bounds + D + channels, mask=real, other=0))
        levels = ((packed >> (2 * s)) & 3) * _UNITS + rest - _ZERO
        keys = low + levels.to(tl.float32) * (step * _UNIT)
        tl.store(target + channels, keys.to(out.dtype.element_ty), mask=real)


def split_dequantise(
    codes: torch.Tensor,
    low_step: torch.Tensor,
    residual: torch.Tensor,
    pages: torch.Tensor,
    *,
    page_size: int,
    out: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Writes the keys of the given physical pages, `low + step * (256 * code + residual - 128) / 256` in out's dtype.

    Args:
        codes, low_step, residual: as in `SplitKeys`.
        pages: `[n]` int32 or int64, physical pages.
        page_size: tokens in a page.
        out: `[Hkv, n * page_size, D]` fp16, bf16 or fp32, last dimension contiguous, written.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    check_choice("page_size", page_size, PAGE_SIZES)
    check_rows("pages", pages, 0)
    check_dtype("pages", pages, torch.int32, torch.int64)
    check_shape("residual", residual, None, None, None, None)
    _, kv_heads, _, head_dim = residual.shape
    check_split_pages(codes, low_step, residual, page_size, kv_heads, head_dim)
    check_shape("out", out, kv_heads, pages.shape[0] * page_size, head_dim)
    check_dtype("out", out, *KV_DTYPES)
    check_inner_contiguous("out", out)
    if not use_triton(impl, residual):
        split_dequantise_reference(codes, low_step, residual, pages, page_size=page_size, out=out)
        return
    if pages.shape[0] == 0:
        return
    _split_dequantise_kernel[(pages.shape[0], kv_heads)](
        codes,
        low_step.view(torch.int16),
        residual,
        pages,
        out,
        out.stride(0),
        out.stride(1),
        kv_heads,
        D=head_dim,
        PAGE=page_size,
        WIDTH=triton.next_power_of_2(head_dim // 4),
        num_warps=8 if page_size * head_dim > 8192 else 4,
    )
