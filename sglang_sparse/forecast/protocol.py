"""What a forecast is."""

from __future__ import annotations

from typing import Protocol

import torch


class Forecast(Protocol):
    """Guesses the queries of a layer from the input of the attention before it.

    The guess is one vector per KV head, which stands for the mean of the queries that share it: blocks are ranked by
    its product with their keys. It is held to nothing, since it only decides what is prefetched.
    """

    name: str

    def __contains__(self, layer: int) -> bool:
        """Whether this layer's queries are forecast; the first layer's never are."""

    def vectors(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[T, Hkv, D]` fp32, rotated: expected mean queries of `layer`.

        Args:
            x: `[T, hidden]`, the normed input of the query projection of layer `layer - 1`.
            positions: `[T]` int64, of the tokens.
        """

    @property
    def bytes(self) -> int:
        """Memory of the weights, over all layers."""
