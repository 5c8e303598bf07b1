"""Bfloat16 as bit patterns, for kernels.

Directed rounding has no Triton operation, and bfloat16 arithmetic in Triton's interpreter is wrong: kernels load and
store bfloat16 tensors as int16 and convert here.
"""

import triton
import triton.language as tl


@triton.jit
def to_float(bits):
    """Int16 or int32 bfloat16 patterns as fp32; exact."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def floor_bits(x):
    """Pattern of the largest bfloat16 that is not above the fp32 `x`."""
    bits = x.to(tl.int32, bitcast=True)
    # The magnitude of a negative number must grow.
    return (bits >> 16) + ((bits < 0) & ((bits & 0xFFFF) != 0)).to(tl.int32)


@triton.jit
def ceil_bits(x):
    """Pattern of the smallest bfloat16 that is not below the fp32 `x`, for `x >= 0`."""
    return (x.to(tl.int32, bitcast=True) + 0xFFFF) >> 16


@triton.jit
def round_half_up(x):
    """The fp32 `x` as bfloat16, ties away from zero, and the same as fp32. The conversion instruction is slow."""
    bits = (x.to(tl.int32, bitcast=True) + 0x8000) & -65536
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), bits.to(tl.float32, bitcast=True)
