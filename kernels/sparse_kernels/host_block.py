"""How a block of a host pool is stored: as it is, or as float8 with a power of two for each token's key and value.

A float8 block of one KV head is `2 * block * (D + 1)` bytes: codes of the keys `[block, D]`, codes of the values, then
exponents of the keys' powers of two `[block]`, and of the values'. A token's vectors have scales of their own, so
that a decode step writes its token without touching others; and since these are powers of two, a block is decoded to
the same bfloat16 or fp32 numbers whoever reads it: four significant bits fit either.
"""

from __future__ import annotations

import torch

from ._checks import KV_DTYPES, check_contiguous, check_dtype, check_shape

PACKED = torch.uint8
"""The dtype of a host pool of float8 blocks."""


def packed_bytes(block_size: int, head_dim: int) -> int:
    """Bytes of a float8 block; a multiple of 16 for blocks of 8 tokens and more."""
    return 2 * block_size * (head_dim + 1)


def pack_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """`[..., 2, block, D]` of any KV dtype as `[..., 2 * block * (D + 1)]` uint8."""
    values = blocks.float()
    bits = values.abs().amax(-1).view(torch.int32)
    # 448 is 1.75 * 2**8: of the largest magnitude, the exponent less 8, or one more.
    exponents = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(1, 253)
    scaled = values * ((254 - exponents) << 23).view(torch.float32)[..., None]
    # What torch makes of infinity depends on its version.
    codes = torch.where(scaled.isfinite(), scaled, float("nan")).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((codes.flatten(-3), exponents.to(torch.uint8).flatten(-2)), -1)


def unpack_blocks(packed: torch.Tensor, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """`[..., 2 * block * (D + 1)]` uint8 as `[..., 2, block, D]` of `dtype`."""
    head_dim = packed.shape[-1] // (2 * block_size) - 1
    codes, exponents = packed.split([2 * block_size * head_dim, 2 * block_size], -1)
    values = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (2, block_size, head_dim))
    scales = (exponents.int() << 23).view(torch.float32).unflatten(-1, (2, block_size))
    return (values * scales[..., None]).to(dtype)


def check_host_layer(host: torch.Tensor, page_size: int, block_size: int, kv_heads: int, head_dim: int) -> None:
    """Raises ValueError unless `host` is one layer of a host pool, `[P, Hkv, page_size // block, 2, block, D]` or, of
    float8 blocks, `[P, Hkv, page_size // block, 2 * block * (D + 1)]`."""
    per_page = page_size // block_size
    if host.dtype == PACKED:
        check_shape("host", host, None, kv_heads, per_page, packed_bytes(block_size, head_dim))
    else:
        check_shape("host", host, None, kv_heads, per_page, 2, block_size, head_dim)
        check_dtype("host", host, *KV_DTYPES, PACKED)
    check_contiguous("host", host)
