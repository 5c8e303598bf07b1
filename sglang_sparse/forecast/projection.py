"""Query projections, and how a layer's own becomes one that takes the input of the layer before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

TINY_GAMMA = 1e-4
"""Norm weights below this share of the layer's largest count as zero: what they scaled away cannot be brought back from
a half-precision input without its rounding errors."""


@dataclass(frozen=True)
class Projection:
    """A normed hidden state to unrotated queries.

    Attributes:
        weight: `[heads * D, hidden]`; heads are query heads, or fewer if they are folded or trained.
        bias: `[heads * D]`, or None.
        head_norm: `[D]`, weights of the RMS norm that each query head goes through, or None.
        head_norm_eps: of that norm.
        input_scale: `[hidden]`, what the input is multiplied with first, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    head_dim: int
    head_norm: torch.Tensor | None = None
    head_norm_eps: float = 0.0
    input_scale: torch.Tensor | None = None

    def before_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Queries `[T, heads, D]` of `x` `[T, hidden]` before the norm by head, in the weight's type."""
        x = x.to(self.weight.dtype)
        if self.input_scale is not None:
            x = x * self.input_scale
        return torch.nn.functional.linear(x, self.weight, self.bias).unflatten(-1, (-1, self.head_dim))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Queries `[T, heads, D]` of `x` `[T, hidden]`, in fp32."""
        y = self.before_norm(x).float()
        if self.head_norm is not None:
            y = y * (y.square().mean(-1, keepdim=True) + self.head_norm_eps).rsqrt() * self.head_norm
        return y

    def after(self, own_norm: torch.Tensor, norm_before: torch.Tensor) -> Projection:
        """This projection for the input of the layer before: as if the residual stream did not change in between.

        It shares its weight with this one.

        Args:
            own_norm: `[hidden]`, norm weights of this projection's layer.
            norm_before: `[hidden]`, those that the input has been scaled with.
        """
        own, before = own_norm.float(), norm_before.float()
        tiny = before.abs() <= TINY_GAMMA * before.abs().max()
        ratio = torch.where(tiny, 0.0, own / torch.where(tiny, 1.0, before))
        return replace(self, input_scale=ratio.to(self.weight.dtype))

    def folded(self, heads: int) -> Projection:
        """A weight of its own, the input's scale in it, and of each group's heads the mean: `heads` are left.

        Raises ValueError for a projection whose heads are normed, whose mean is no projection.
        """
        if self.head_norm is not None:
            raise ValueError("the mean of normed heads is no projection")

        def mean(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(0, (heads, -1, self.head_dim)).mean(1).flatten(0, 1)

        weight = self.weight.float() * (1 if self.input_scale is None else self.input_scale.float())
        bias = None if self.bias is None else mean(self.bias.float()).to(self.bias.dtype)
        return replace(self, weight=mean(weight).to(self.weight.dtype), bias=bias, input_scale=None)

    def linearised(self, x: torch.Tensor) -> Projection:
        """Without the norm by head: each head scaled by its mean factor over `x` (`[T, hidden]`)."""
        if self.head_norm is None:
            return self
        y = replace(self, head_norm=None)(x)
        scale = (y.square().mean(-1) + self.head_norm_eps).rsqrt().mean(0)
        rows = (scale[:, None] * self.head_norm).flatten()
        bias = None if self.bias is None else (self.bias.float() * rows).to(self.bias.dtype)
        weight = (self.weight.float() * rows[:, None]).to(self.weight.dtype)
        return replace(self, weight=weight, bias=bias, head_norm=None)
