"""What forecasts need of a model: query projections, norms and rotary embeddings, from SGLang or transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .errors import ForecastError
from .projection import Projection
from .rotary import Rotary

ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
)
GLOBAL_LAYER = "full_attention"

SMALL = 2.0**-14
"""Weights below it are not hashed: half precision does not hold them as bfloat16 does."""


@dataclass(frozen=True)
class LayerParts:
    """One attention layer.

    Attributes:
        norm: `[hidden]`, what the layer's normed input was scaled with.
        projection: the layer's own query projection.
        rotary: of its queries; None if it attends to a window, so that it has no blocks to forecast.
        attention: the module that holds the projection.
    """

    norm: torch.Tensor
    projection: Projection
    rotary: Rotary | None
    attention: Any


@dataclass(frozen=True)
class Identity:
    """Which model a file of trained heads belongs to."""

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    q_hash: str
    """Of all query projections, the same for a model in bfloat16, float32 or, if it was made in bfloat16, float16."""

    def __str__(self) -> str:
        return (
            f"{self.architecture} of {self.layers} layers, {self.kv_heads} KV heads, head dim {self.head_dim}, "
            f"hidden size {self.hidden_size}, query projections {self.q_hash[:12]}"
        )


@dataclass(frozen=True)
class ModelParts:
    """All layers of a model, in order."""

    architecture: str
    kv_heads: int
    head_dim: int
    layers: tuple[LayerParts, ...]

    @property
    def hidden_size(self) -> int:
        return self.layers[0].projection.weight.shape[1]

    def forecastable(self) -> Iterator[int]:
        """Layers that have another before them and attend to everything."""
        return (layer for layer in range(1, len(self.layers)) if self.layers[layer].rotary is not None)

    def identity(self) -> Identity:
        """Reads all query projections."""
        digest = hashlib.sha256()
        for layer in self.layers:
            weight = layer.projection.weight.detach().to(torch.bfloat16)
            weight = torch.where(weight.abs() < SMALL, torch.zeros_like(weight), weight)
            digest.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return Identity(
            self.architecture, len(self.layers), self.kv_heads, self.head_dim, self.hidden_size, digest.hexdigest()
        )


def _norm_weight(norm: Any, architecture: str) -> torch.Tensor:
    """What a norm multiplies with; Gemma keeps it less 1."""
    weight = norm.weight.detach()
    return weight.float() + 1 if architecture.startswith("Gemma") else weight


def _decoder(model: Any) -> Any:
    """The module that has the decoder layers."""
    for path in ("model", "language_model", "model.language_model", "language_model.model"):
        module = model
        for name in path.split("."):
            module = getattr(module, name, None)
        if hasattr(module, "layers"):
            return module
    raise ForecastError(f"{type(model).__name__} has no decoder layers where forecasts look for them")


def _check(architecture: str, weight: Any, rows: int, what: str) -> None:
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.element_size() < 2:
        raise ForecastError(
            f"the {what} of {architecture} is quantised, which forecasts cannot read: use --sparse-decode-forecast none"
        )
    if weight.ndim != 2 or weight.shape[0] < rows:
        raise ForecastError(
            f"the {what} of {architecture} has the shape {list(weight.shape)}, where forecasts expect at least "
            f"{rows} rows: use --sparse-decode-forecast none"
        )


def check_architecture(architecture: str) -> None:
    """Raises ForecastError unless forecasts know how the model makes queries."""
    if architecture not in ARCHITECTURES:
        raise ForecastError(
            f"there are no forecasts for {architecture}: use --sparse-decode-forecast none, or one of "
            f"{', '.join(ARCHITECTURES)}"
        )


def _projection(attention: Any, architecture: str, query_heads: int, head_dim: int) -> Projection:
    rows = query_heads * head_dim
    module = getattr(attention, "q_proj", None) or attention.qkv_proj
    weight = getattr(module, "weight", None)
    if getattr(module, "use_intel_amx_backend", False):
        raise ForecastError(
            f"the query projection of {architecture} is packed for AMX, which forecasts cannot read: use "
            "--sparse-decode-forecast none"
        )
    _check(architecture, weight, rows, "query projection")
    assert weight is not None
    bias = getattr(module, "bias", None)
    norm = getattr(attention, "q_norm", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
    return Projection(
        weight=weight.detach()[:rows],
        bias=None if bias is None else bias.detach()[:rows],
        head_dim=head_dim,
        head_norm=None if norm is None else _norm_weight(norm, architecture).float(),
        head_norm_eps=float(eps),
    )


def parts_of_transformers(model: Any, positions: int) -> ModelParts:
    """Parts of a causal language model of transformers, for sequences of up to `positions` tokens.

    Raises ForecastError if it is of another kind.
    """
    architecture = (getattr(model.config, "architectures", None) or [type(model).__name__])[0]
    check_architecture(architecture)
    config = getattr(model.config, "text_config", model.config)
    decoder = _decoder(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = getattr(config, "layer_types", None) if architecture.startswith("Gemma3") else None
    rotary = Rotary.of_transformers(decoder.rotary_emb, positions, GLOBAL_LAYER if types else None)
    layers = tuple(
        LayerParts(
            norm=_norm_weight(layer.input_layernorm, architecture),
            projection=_projection(layer.self_attn, architecture, config.num_attention_heads, head_dim),
            rotary=rotary if types is None or types[index] == GLOBAL_LAYER else None,
            attention=layer.self_attn,
        )
        for index, layer in enumerate(decoder.layers)
    )
    return ModelParts(architecture, config.num_key_value_heads, head_dim, layers)


def parts_of_sglang(model: Any) -> ModelParts:
    """Parts of a model that SGLang serves without tensor parallelism; raises ForecastError if it is of another kind."""
    architecture = type(model).__name__
    check_architecture(architecture)
    rotaries: dict[int, Rotary] = {}
    layers = []
    for layer in _decoder(model).layers:
        attention = layer.self_attn
        module = attention.rotary_emb
        rotary = rotaries.setdefault(id(module), Rotary.of_sglang(module))
        own = attention.attn
        layers.append(
            LayerParts(
                norm=_norm_weight(layer.input_layernorm, architecture),
                projection=_projection(attention, architecture, own.tp_q_head_num, own.qk_head_dim),
                rotary=rotary if own.sliding_window_size == -1 else None,
                attention=attention,
            )
        )
    return ModelParts(architecture, own.tp_k_head_num, own.qk_head_dim, tuple(layers))
