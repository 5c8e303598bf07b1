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
        weight: `[Hq * D, hidden]`, or `[Hkv * D, hidden]` if it is folded or trained.
        bias: `[same rows]`, or None.
        head_norm: `[D]`, weights of the RMS norm that each query head goes through, or None.
        head_norm_eps: of that norm.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    head_dim: int
    head_norm: torch.Tensor | None = None
    head_norm_eps: float = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Queries `[T, heads, D]` of `x` `[T, hidden]`, in fp32."""
        y = torch.nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias)
        y = y.unflatten(-1, (-1, self.head_dim)).float()
        if self.head_norm is not None:
            y = y * (y.square().mean(-1, keepdim=True) + self.head_norm_eps).rsqrt() * self.head_norm
        return y

    def mean_queries(self, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """`[T, Hkv, D]` fp32: the mean of the query heads that share a KV head."""
        return self(x).unflatten(1, (kv_heads, -1)).mean(2)

    def after(self, own_norm: torch.Tensor, norm_before: torch.Tensor) -> Projection:
        """This projection for the input of the layer before: as if the residual stream did not change in between.

        Args:
            own_norm: `[hidden]`, norm weights of this projection's layer.
            norm_before: `[hidden]`, those that the input has been scaled with.
        """
        own, before = own_norm.float(), norm_before.float()
        tiny = before.abs() <= TINY_GAMMA * before.abs().max()
        ratio = torch.where(tiny, 0.0, own / torch.where(tiny, 1.0, before))
        return replace(self, weight=(self.weight.float() * ratio).to(self.weight.dtype))

    def folded(self, kv_heads: int) -> Projection:
        """The mean over the heads of each group: `kv_heads` heads. Only without a norm by head is it the same."""

        def mean(tensor: torch.Tensor) -> torch.Tensor:
            grouped = tensor.float().unflatten(0, (kv_heads, -1, self.head_dim))
            return grouped.mean(1).flatten(0, 1).to(tensor.dtype)

        if self.head_norm is not None:
            raise ValueError("the mean of normed heads is no projection")
        return replace(self, weight=mean(self.weight), bias=None if self.bias is None else mean(self.bias))

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

    @property
    def bytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)
