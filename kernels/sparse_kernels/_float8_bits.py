"""float8 e4m3 by integer arithmetic: the same bits on every GPU and in Triton's interpreter.

A vector of one token is stored as codes and a power of two, the smallest with which its largest value is at most 448.
"""

import triton
import triton.language as tl


@triton.jit
def scale_bits(largest):
    """The exponent field (int32, 1 to 253) of the fp32 power of two for vectors with these largest magnitudes."""
    bits = largest.to(tl.float32).to(tl.int32, bitcast=True)
    # 448 is 1.75 * 2**8.
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, 1), 253)


@triton.jit
def encode(values, exponents):
    """Codes (uint8) of fp32 values, rounded to nearest even; what is not finite becomes NaN."""
    # The reciprocal of a power of two has 254 less its exponent field.
    scaled = values * ((254 - exponents) << 23).to(tl.float32, bitcast=True)
    bits = scaled.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes are multiples of 2**-9, which is the distance of fp32 numbers from 2**14 on.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude >= 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def decode(codes, exponents):
    """fp32 values of codes (uint8) and exponent fields (int32)."""
    bits = codes.to(tl.int32)
    # Read as an fp32 number, exponent and mantissa are 2**120 too small, denormal ones too.
    value = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    value = tl.where((bits & 0x80) != 0, -value, value)
    return value * (exponents << 23).to(tl.float32, bitcast=True)
