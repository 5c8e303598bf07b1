"""Pieces of the kernels that scan thumbnails: a page's packed codes, its bounds, and the products with the query.

Codes are unpacked inside the product: a mask leaves each where it lies in its byte or word, times a power of two that
the folded query makes up for. The columns of a packed row hold sub-ranges of the channels (`channels_of`).
"""

import triton
import triton.language as tl

from . import _bfloat16_bits as bfloat16_bits


@triton.jit
def channels_of(rows, D: tl.constexpr, SUB_ROWS: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr):
    """Channel of each row of a folded query, whether there is one, and the inverse of what its codes are multiplied by.

    Row r belongs to column `r % SUB_ROWS` of sub-range `r // SUB_ROWS`. Codes of four bits are read as words of 16 bits
    if HALF, which saves unpacking, others as bytes.
    """
    SUBS: tl.constexpr = 2 if BITS == 4 and not HALF else 4
    BYTES: tl.constexpr = D // SUBS
    subs = rows // SUB_ROWS
    if BITS == 4 and HALF:
        channels = subs % 2 * (D // 2) + 2 * (rows % SUB_ROWS) + subs // 2
        inverse_factor = tl.where(subs % 2 == 0, 1.0, 0.0625)
    else:
        channels = subs * BYTES + rows % SUB_ROWS
        if BITS == 4:
            inverse_factor = tl.where(subs == 0, 1.0, 0.125)
        else:
            inverse_factor = tl.where(subs == 0, 1.0, tl.where(subs == 1, 0.25, 0.0625))
    return channels, rows % SUB_ROWS < BYTES, inverse_factor


@triton.jit
def load_bounds(low_step, summary, channels, real, D: tl.constexpr, VECTORS: tl.constexpr = False):
    """Bit patterns of a page's low and step, for a column of channels; one channel a thread unless VECTORS."""
    bounds = low_step + summary * (2 * D) + channels
    if not VECTORS:
        bounds = tl.max_contiguous(bounds, [1, 1])
    return tl.load(bounds, mask=real, other=0), tl.load(bounds + D, mask=real, other=0)


@triton.jit
def load_codes(
    codes,
    summary,
    tokens,
    columns,
    present,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Packed codes of a page, `[PAGE, SUB_ROWS]`, words of 16 bits if four bits are HALF, else bytes; and the plane of
    their high bits if there are three. Nothing is read unless `present`."""
    BYTES: tl.constexpr = D // (2 if BITS == 4 and not HALF else 4)
    if BITS == 4 and HALF:
        packed_rows = codes.to(tl.pointer_type(tl.int16)) + (summary * PAGE + tokens) * (D // 4)
    else:
        packed_rows = codes + (summary * PAGE + tokens) * (D * BITS // 8)
    packed = tl.load(packed_rows + columns, mask=(columns < BYTES) & present, other=0)
    high = packed
    if BITS == 3:
        high = tl.load(packed_rows + BYTES + columns % (BYTES // 2), mask=(columns < BYTES) & present, other=0)
        high = high_plane(high, columns, BYTES, HALF)
    return packed, high


@triton.jit
def fold(query, low, step, inverse_factor, WORDS: tl.constexpr, HALF: tl.constexpr):
    """What the codes are multiplied by, and, channel by channel, what is added to the products, from the query and the
    bit patterns of low and step."""
    bias = query * bfloat16_bits.to_float(low)
    # Not the query times the factor, which would take registers for the whole row.
    folded = query * (bfloat16_bits.to_float(step) * inverse_factor)
    if WORDS:
        # A query so large that its product with a step leaves float16's range is kept at its end.
        folded = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [folded], tl.float16, is_pure=True, pack=2
        )
    elif HALF:
        # Codes go into the product as 128 + code (see `levels`): 128 times the rounded query is too much.
        folded, rounded = bfloat16_bits.round_half_up(folded)
        bias -= 128.0 * rounded
    return folded, bias


@triton.jit
def split_subs(folded, SUBS: tl.constexpr):
    """The sub-ranges of `folded [SUBS * ROWS, GROUP]`: four tiles `[ROWS, GROUP]`, two repeated if SUBS is 2."""
    ROWS: tl.constexpr = folded.shape[0] // SUBS
    GROUP: tl.constexpr = folded.shape[1]
    if SUBS == 2:
        f0, f1 = tl.split(tl.permute(tl.reshape(folded, (2, ROWS, GROUP)), (1, 2, 0)))
        f2, f3 = f0, f1
    else:
        even, odd = tl.split(tl.permute(tl.reshape(folded, (2, 2, ROWS, GROUP)), (2, 3, 0, 1)))
        f0, f2 = tl.split(even)
        f1, f3 = tl.split(odd)
    return f0, f1, f2, f3


@triton.constexpr_function
def _word_asm(sub: int) -> str:
    """PTX that leaves one of the four codes in each of two words, the odd sub-ranges' times 16."""
    shift, mask = 8 * (sub // 2), 0x000F000F << 4 * (sub % 2)
    return f"{{ .reg .b32 t; shr.b32 t, $1, {shift}; and.b32 $0, t, 0x{mask:08x}; }}"


@triton.constexpr_function
def _unpack_asm(bits: int, sub: int) -> str:
    """PTX that turns four packed bytes into the bfloat16 of `128 + factor * code` of sub-range `sub`; see `levels`.

    $2 holds the bytes, $3 those of the high plane of three bits, its bits at even positions. A mask leaves each code in
    its byte; byte permutes put 0x43 above it. Each of the four stays in its place: which elements share a register is
    the compiler's choice.
    """
    mask, shift = (0x30, 2) if sub == 3 else (3 << 2 * sub, 0)
    asm = f"shr.b32 t, $2, {shift}; and.b32 t, t, 0x{mask * 0x01010101:08x}; "
    if bits == 3:
        mask, left = (0x40, 0) if sub == 3 else (4 << 2 * sub, 2)
        # lop3 with 0xEA is (a & b) | c.
        asm += f"shl.b32 u, $3, {left}; lop3.b32 t, u, 0x{mask * 0x01010101:08x}, t, 0xEA; "
    asm += "prmt.b32 $0, t, 0x43434343, 0x4140; prmt.b32 $1, t, 0x43434343, 0x4342; "
    return "{ .reg .b32 t, u; " + asm + "}"


@triton.jit
def high_plane(high, columns, BYTES: tl.constexpr, HALF: tl.constexpr):
    """Moves the high bits of a tile's columns to even positions: bit s of sub-range s to position 2 * s.

    Bit s of byte i belongs to channel `i + s * D / 8`: even s to the lower half of sub-range `s // 2`, odd ones to the
    upper half.
    """
    if HALF:
        upper = tl.where(columns >= BYTES // 2, 255, 0).to(tl.uint8) + tl.zeros_like(high)
        # lop3 with 0xCA is a ? b : c.
        ASM: tl.constexpr = "{ .reg .b32 t; shr.b32 t, $1, 1; lop3.b32 t, $2, t, $1, 0xCA; and.b32 $0, t, 0x55555555; }"
        return tl.inline_asm_elementwise(ASM, "=r,r,r", [high, upper], tl.uint8, is_pure=True, pack=4)
    else:
        return tl.where(columns >= BYTES // 2, high >> 1, high) & 0x55


@triton.jit
def levels(codes, high, S: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr):
    """Sub-range S of packed codes, times a power of two.

    Masking a field where it lies multiplies its code by a power of two, the factor; fields above bit 6 are shifted down
    first. fp32: `factor * code`. HALF: no conversion instruction, which would cost more than the load. Of four bits,
    which come in words of 16, the masked word is the subnormal float16 `2**-24 * factor * code`, which tensor cores
    multiply exactly. Of two and three, which come in bytes, `0x4300 | x` is the bfloat16 of `128 + x` for `x < 128`.
    """
    if BITS == 4 and HALF:
        WORD_ASM: tl.constexpr = _word_asm(S)
        levels = tl.inline_asm_elementwise(WORD_ASM, "=r,r", [codes], tl.float16, is_pure=True, pack=2)
    elif HALF:
        ASM: tl.constexpr = _unpack_asm(BITS, S)
        levels = tl.inline_asm_elementwise(ASM, "=&r,=&r,r,r", [codes, high], tl.bfloat16, is_pure=True, pack=4)
    else:
        codes = codes.to(tl.int32)
        high = high.to(tl.int32)
        if BITS == 4:
            fields = (codes & 0xF) if S == 0 else ((codes >> 1) & 0x78)
        else:
            fields = ((codes >> 2) & 0x30) if S == 3 else (codes & (3 << (2 * S)))
            if BITS == 3:
                fields |= (high & 0x40) if S == 3 else ((high << 2) & (4 << (2 * S)))
        levels = fields.to(tl.float32)
    return levels


@triton.jit
def score(packed, high, f0, f1, f2, f3, scores, BITS: tl.constexpr, HALF: tl.constexpr):
    """`scores [PAGE, columns]` and the products of a page's codes with the folded query's sub-ranges."""
    scores = tl.dot(levels(packed, high, 0, BITS, HALF), f0, scores, input_precision="ieee")
    scores = tl.dot(levels(packed, high, 1, BITS, HALF), f1, scores, input_precision="ieee")
    if BITS != 4 or HALF:
        scores = tl.dot(levels(packed, high, 2, BITS, HALF), f2, scores, input_precision="ieee")
        scores = tl.dot(levels(packed, high, 3, BITS, HALF), f3, scores, input_precision="ieee")
    return scores
