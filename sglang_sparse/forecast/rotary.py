"""Rotary position embedding from a model's own table, so that whatever scaling the model has is in it."""

from __future__ import annotations

from typing import Any

import torch

from .errors import ForecastError


class Rotary:
    """Rotates vectors as a model rotates its queries.

    Args:
        cos_sin: `[positions, 2, R / 2]` fp32; the first R channels of a head are rotated, R at most D.
        interleaved: whether channels 2i and 2i + 1 make a pair (GPT-J), not i and i + R / 2.
    """

    def __init__(self, cos_sin: torch.Tensor, interleaved: bool = False) -> None:
        self.cos_sin = cos_sin
        self.interleaved = interleaved

    @classmethod
    def of_sglang(cls, module: Any) -> Rotary:
        """From the rotary embedding of an attention of SGLang. Raises ForecastError if it has no plain table."""
        table = getattr(module, "cos_sin_cache", None)
        if not isinstance(table, torch.Tensor) or table.ndim != 2 or getattr(module, "mrope_section", None):
            raise ForecastError(
                f"the rotary embedding {type(module).__name__} has no table of positions: use "
                "--sparse-decode-forecast none"
            )
        return cls(table.float().unflatten(1, (2, -1)).contiguous(), not module.is_neox_style)

    @classmethod
    def of_transformers(cls, module: Any, positions: int, layer_type: str | None = None) -> Rotary:
        """From the rotary embedding of a model of transformers, for so many positions.

        `layer_type` names one of several tables, as models with local and global layers have.
        """
        device = next(module.buffers()).device
        places = torch.arange(positions, device=device)[None]
        more = () if layer_type is None else (layer_type,)
        cos, sin = module(torch.zeros(1, device=device), places, *more)
        half = cos.shape[-1] // 2
        return cls(torch.stack((cos[0, :, :half], sin[0, :, :half]), 1).float())

    def __call__(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`vectors` (`[T, H, R, D]`) rotated to `positions` (`[T]`); those beyond the table count as its last."""
        cos, sin = self.cos_sin[positions.clamp(0, len(self.cos_sin) - 1)].unbind(1)
        cos, sin = cos[:, None, None], sin[:, None, None]
        size = 2 * cos.shape[-1]
        turned, rest = vectors[..., :size], vectors[..., size:]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            both = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            both = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((both, rest), -1)
