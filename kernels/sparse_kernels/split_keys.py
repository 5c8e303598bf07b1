"""Split keys: closed pages as 2-bit codes, a low and a step of each page and channel, and an 8-bit residual of each
element; pages that requests are still writing as they are.

A key is `low + step * n / 256`, where `n = 256 * code + residual - 128` is a number of ten bits, the code above the
residual's byte. Codes, low and step are the 2-bit `thumbnail` of the page, which estimators read by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._checks import check_contiguous, check_dtype, check_rows, check_shape
from .thumbnail import unpack_codes

CODE_BITS = 2
UNITS = 256
"""Levels of the residual between two codes: a power of two, so that scaling by it is exact."""

ZERO = 128
"""The byte of a residual of 0."""


@dataclass(frozen=True)
class SplitKeys:
    """The keys of one layer.

    Attributes:
        codes: `[P, Hkv, page_size, D // 4]` uint8, contiguous; packed as `unpack_codes` says.
        low_step: `[P, Hkv, 2, D]` bfloat16, contiguous: low, then step.
        residual: `[P, Hkv, page_size, D]` uint8, contiguous.
        open_keys: `[rows * page_size, Hkv, D]` in KV dtype, contiguous: the pages that requests' last tokens are in,
            until they are full.
        open_rows: `[>=B]` int32: the row of each request in them.
    """

    codes: torch.Tensor
    low_step: torch.Tensor
    residual: torch.Tensor
    open_keys: torch.Tensor
    open_rows: torch.Tensor

    def check(self, out: torch.Tensor, page_size: int) -> None:
        """Raises ValueError unless the tensors fit together and an attention that writes `out [B, Hq, D]`."""
        check_shape("keys.open_keys", self.open_keys, None, None, out.shape[2])
        check_contiguous("keys.open_keys", self.open_keys)
        check_dtype("keys.open_keys", self.open_keys, out.dtype)
        if self.open_keys.shape[0] % page_size:
            raise ValueError(
                f"keys.open_keys has {self.open_keys.shape[0]} tokens; needed: a multiple of page_size={page_size}"
            )
        check_split_pages(self.codes, self.low_step, self.residual, page_size, *self.open_keys.shape[1:])
        check_rows("keys.open_rows", self.open_rows, out.shape[0])
        check_dtype("keys.open_rows", self.open_rows, torch.int32)


def check_split_pages(
    codes: torch.Tensor,
    low_step: torch.Tensor,
    residual: torch.Tensor,
    page_size: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """Raises ValueError unless these are split keys of as many pages as `residual` has."""
    check_shape("residual", residual, None, kv_heads, page_size, head_dim)
    pages = residual.shape[0]
    check_shape("codes", codes, pages, kv_heads, page_size, head_dim * CODE_BITS // 8)
    check_shape("low_step", low_step, pages, kv_heads, 2, head_dim)
    for name, tensor, dtype in (
        ("residual", residual, torch.uint8),
        ("codes", codes, torch.uint8),
        ("low_step", low_step, torch.bfloat16),
    ):
        check_dtype(name, tensor, dtype)
        check_contiguous(name, tensor)


def reconstruct(codes: torch.Tensor, low_step: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The keys of split pages, in fp32, in plain torch.

    Args:
        codes: `[n, Hkv, page_size, D // 4]`.
        low_step: `[n, Hkv, 2, D]`.
        residual: `[n, Hkv, page_size, D]`.

    Returns:
        `[n, Hkv, page_size, D]` fp32.
    """
    levels = unpack_codes(codes, CODE_BITS, residual.shape[-1]).float() * UNITS + (residual.float() - ZERO)
    low, step = low_step.float().unsqueeze(3).unbind(2)
    # In two roundings, which kernels leave to a fused operation: they differ in the last bit of fp32.
    return low + levels * (step / UNITS)
