"""What a forecast is."""

from __future__ import annotations

from typing import Protocol

import torch


class Forecast(Protocol):
    """Guesses the queries of a layer from the input of the attention before it.

    The guess is a few vectors per KV head, one for each query head that shares it or one for all of them: blocks are
    ranked by their attention. It is held to nothing, since it only decides what is prefetched; not so in `chooser`, a
    baseline.
    """

    name: str
    per_head: int
    """Vectors per KV head."""

    def __contains__(self, layer: int) -> bool:
        """Whether this layer's queries are forecast; the first layer's never are."""

    def vectors(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[T, Hkv, R, D]` fp32, rotated: expected queries of `layer`; R is `per_head`.

        Args:
            x: `[T, hidden]`, the normed input of the query projection of layer `layer - 1`.
            positions: `[T]` int64, of the tokens.
        """

    @property
    def bytes(self) -> int:
        """Memory of the weights, over all layers."""
