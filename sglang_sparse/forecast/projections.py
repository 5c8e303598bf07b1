"""Forecasts by projection: the next layer's own queries (`query`), and trained ones (`heads`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .model_parts import ModelParts
from .projection import Projection
from .rotary import Rotary


class ProjectedForecast:
    """A projection for each layer that is forecast; see `Forecast`."""

    def __init__(
        self, name: str, projections: Mapping[int, Projection], rotaries: Mapping[int, Rotary], kv_heads: int
    ) -> None:
        self.name = name
        self.projections = dict(projections)
        self._rotaries = dict(rotaries)
        self._kv_heads = kv_heads

    def __contains__(self, layer: int) -> bool:
        return layer in self.projections

    def vectors(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._rotaries[layer](self.projections[layer].mean_queries(x, self._kv_heads), positions)

    @property
    def bytes(self) -> int:
        return sum(projection.bytes for projection in self.projections.values())


def rotaries(parts: ModelParts) -> dict[int, Rotary]:
    """Those of the layers that can be forecast."""
    return {layer: rotary for layer in parts.forecastable() if (rotary := parts.layers[layer].rotary) is not None}


def next_query(parts: ModelParts, layer: int) -> Projection:
    """The projection of a layer for the input of the layer before; all its query heads if each is normed."""
    own, before = parts.layers[layer], parts.layers[layer - 1]
    taken = own.projection.after(own.norm, before.norm)
    return taken if taken.head_norm is not None else taken.folded(parts.kv_heads)


def query_forecast(parts: ModelParts) -> ProjectedForecast:
    """`query`: each layer's own query projection on the input of the layer before it. Needs no training."""
    made = {layer: next_query(parts, layer) for layer in parts.forecastable()}
    return ProjectedForecast("query", made, rotaries(parts), parts.kv_heads)


def heads_forecast(
    parts: ModelParts, weights: Mapping[int, tuple[torch.Tensor, torch.Tensor | None]]
) -> ProjectedForecast:
    """`heads`: trained projections, `[Hkv * D, hidden]` and `[Hkv * D]` or None by layer, in the model's type."""
    made = {}
    for layer, (weight, bias) in weights.items():
        like = parts.layers[layer].projection.weight
        made[layer] = Projection(weight.to(like), None if bias is None else bias.to(like), parts.head_dim)
    return ProjectedForecast("heads", made, rotaries(parts), parts.kv_heads)
