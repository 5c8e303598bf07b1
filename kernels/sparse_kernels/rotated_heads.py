"""From a query projection's output to queries: the RMS norm of each head, if there is one, and rotary embedding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import KV_DTYPES, check_contiguous, check_dtype, check_inner_contiguous, check_shape
from ._dispatch import use_triton


def rotated_heads_reference(
    y: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool,
    head_norm: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
) -> None:
    """Torch reference of `rotated_heads`."""
    heads = y.float()
    if head_norm is not None:
        heads = heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * head_norm
    cos, sin = cos_sin[positions.clamp(0, len(cos_sin) - 1)][:, None].unbind(2)
    size = 2 * cos.shape[-1]
    turned, rest = heads[..., :size], heads[..., size:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        both = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        both = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    out.copy_(torch.cat((both, rest), -1))


@triton.jit
def _rotated_heads_kernel(
    y,
    cos_sin,
    positions,
    head_norm,
    out,
    y_stride,
    out_stride,
    places,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, ROWS)
    real = channels < D
    turned = channels < 2 * HALF
    if INTERLEAVED:
        partner = channels ^ 1
        angle = channels // 2
        first = channels % 2 == 0
    else:
        partner = tl.where(channels < HALF, channels + HALF, channels - HALF)
        angle = channels % HALF
        first = channels < HALF
    place = tl.minimum(tl.maximum(tl.load(positions + t), 0), places - 1).to(tl.int64)
    table = cos_sin + place * (2 * HALF) + angle
    cos = tl.load(table, mask=turned, other=1.0)
    sin = tl.load(table + HALF, mask=turned, other=0.0)
    row = y + t * y_stride + tl.program_id(1) * D
    own = tl.load(row + channels, mask=real, other=0.0).to(tl.float32)
    other = tl.load(row + partner, mask=turned, other=0.0).to(tl.float32)
    if head_norm is not None:
        factor = tl.rsqrt(tl.sum(own * own, 0) / D + eps)
        own = own * factor * tl.load(head_norm + channels, mask=real, other=0.0)
        other = other * factor * tl.load(head_norm + partner, mask=turned, other=0.0)
    made = own * cos + tl.where(first, -other, other) * sin
    target = out + t * out_stride + tl.program_id(1) * D
    tl.store(target + channels, made.to(out.dtype.element_ty), mask=real)


def _rotated_heads_triton(
    y: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool,
    head_norm: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
) -> None:
    tokens, heads, head_dim = y.shape
    if tokens == 0:
        return
    _rotated_heads_kernel[(tokens, heads)](
        y,
        cos_sin,
        positions,
        head_norm,
        out,
        y.stride(0),
        out.stride(0),
        cos_sin.shape[0],
        eps,
        D=head_dim,
        HALF=cos_sin.shape[2],
        INTERLEAVED=interleaved,
        ROWS=triton.next_power_of_2(head_dim),
        num_warps=1,
    )


def rotated_heads(
    y: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool,
    head_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Norms and rotates the heads of each token, in fp32.

    Args:
        y: `[T, H, D]` fp16, bf16 or fp32; a token's heads side by side.
        cos_sin: `[positions, 2, R / 2]` fp32: the first R channels of a head are rotated, R at most D.
        positions: `[T]` int64; those outside the table count as its nearest.
        interleaved: whether channels 2i and 2i + 1 make a pair (GPT-J), not i and i + R / 2.
        head_norm: `[D]` fp32, weights of the RMS norm that each head goes through first, or None.
        eps: of that norm.
        out: `[T, H, D]` fp16, bf16 or fp32; a token's heads side by side.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    check_shape("y", y, None, None, None)
    tokens, heads, head_dim = y.shape
    check_shape("out", out, tokens, heads, head_dim)
    for name, tensor in (("y", y), ("out", out)):
        check_dtype(name, tensor, *KV_DTYPES)
        check_inner_contiguous(name, tensor)
        if tensor.stride(1) != head_dim:
            raise ValueError(f"{name} has stride {tensor.stride(1)} between heads; needed: {head_dim}")
    check_shape("cos_sin", cos_sin, None, 2, None)
    check_dtype("cos_sin", cos_sin, torch.float32)
    check_contiguous("cos_sin", cos_sin)
    if not 1 <= cos_sin.shape[2] <= head_dim // 2:
        raise ValueError(f"cos_sin has {cos_sin.shape[2]} angles; needed: 1 to {head_dim // 2}")
    check_shape("positions", positions, tokens)
    check_dtype("positions", positions, torch.int64)
    check_contiguous("positions", positions)
    if head_norm is not None:
        check_shape("head_norm", head_norm, head_dim)
        check_dtype("head_norm", head_norm, torch.float32)
        check_contiguous("head_norm", head_norm)
    run = _rotated_heads_triton if use_triton(impl, y) else rotated_heads_reference
    run(y, cos_sin, positions, interleaved=interleaved, head_norm=head_norm, eps=eps, out=out)
