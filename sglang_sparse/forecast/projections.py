"""Forecasts by projection: the next layer's own queries (`query`), and trained ones (`heads`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from sparse_kernels import rotated_heads

from .model_parts import ModelParts
from .projection import Projection
from .protocol import Forecast


class ProjectedForecast:
    """A projection for each layer that is forecast, all with as many heads; see `Forecast`."""

    def __init__(self, name: str, projections: Mapping[int, Projection], parts: ModelParts, own_bytes: int = 0) -> None:
        self.name = name
        self.projections = dict(projections)
        self.bytes = own_bytes
        self._parts = parts
        rows = {projection.weight.shape[0] for projection in self.projections.values()}
        self.per_head = max(rows, default=0) // (parts.kv_heads * parts.head_dim)

    def __contains__(self, layer: int) -> bool:
        return layer in self.projections

    def vectors(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rotary, projection = self._parts.layers[layer].rotary, self.projections[layer]
        assert rotary is not None
        y = projection.before_norm(x)
        out = torch.empty(y.shape, dtype=torch.float32, device=y.device)
        rotated_heads(
            y,
            rotary.cos_sin,
            positions,
            interleaved=rotary.interleaved,
            head_norm=projection.head_norm,
            eps=projection.head_norm_eps,
            out=out,
        )
        return out.unflatten(1, (self._parts.kv_heads, self.per_head))


class OneVector:
    """A forecast with the mean of its vectors for each KV head, as SparDA has one; see `Forecast`."""

    per_head = 1

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self.name = f"{forecast.name}, one vector a KV head"

    def __contains__(self, layer: int) -> bool:
        return layer in self._forecast

    def vectors(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._forecast.vectors(layer, x, positions).mean(2, keepdim=True)

    @property
    def bytes(self) -> int:
        return self._forecast.bytes


def next_query(parts: ModelParts, layer: int) -> Projection:
    """The query projection of a layer for the input of the layer before."""
    own, before = parts.layers[layer], parts.layers[layer - 1]
    return own.projection.after(own.norm, before.norm)


def query_forecast(parts: ModelParts) -> ProjectedForecast:
    """`query`: each layer's own query projection on the input of the layer before it.

    Needs no training and, since it reads the model's own weights, no memory.
    """
    return ProjectedForecast("query", {layer: next_query(parts, layer) for layer in parts.forecastable()}, parts)


def folded_forecast(parts: ModelParts) -> ProjectedForecast:
    """`query` with one vector per KV head, the mean of its query heads: a fraction of the work, and a coarser guess.

    Only for models without norms by head.
    """
    made = {layer: next_query(parts, layer).folded(parts.kv_heads) for layer in parts.forecastable()}
    return ProjectedForecast("query, folded", made, parts, _bytes(made))


def heads_forecast(
    parts: ModelParts, weights: Mapping[int, tuple[torch.Tensor, torch.Tensor | None]]
) -> ProjectedForecast:
    """`heads`: trained projections, by layer `[Hkv * R * D, hidden]` and `[Hkv * R * D]` or None."""
    made = {}
    for layer, (weight, bias) in weights.items():
        like = parts.layers[layer].projection.weight
        made[layer] = Projection(weight.to(like), None if bias is None else bias.to(like), parts.head_dim)
    return ProjectedForecast("heads", made, parts, _bytes(made))


def _bytes(projections: Mapping[int, Projection]) -> int:
    tensors = [t for p in projections.values() for t in (p.weight, p.bias) if t is not None]
    return sum(tensor.nbytes for tensor in tensors)
