"""Files of trained heads: safetensors that say which model they were trained for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from sglang_sparse.files import write_bytes

from .errors import ForecastError
from .model_parts import Identity, ModelParts

FORMAT = "sglang-sparse forecast heads 1"
METADATA = "forecast"
"""Entry of the file's metadata that holds the model's identity, as JSON."""

Heads = dict[int, tuple[torch.Tensor, torch.Tensor | None]]
"""By layer: weight `[Hkv * R * D, hidden]` and bias `[Hkv * R * D]` or None; R divides the query heads of a KV head."""


def write_heads(path: Path, heads: Mapping[int, tuple[torch.Tensor, torch.Tensor | None]], identity: Identity) -> None:
    """Writes a file that `read_heads` reads, whole or not at all."""
    from safetensors.torch import save

    tensors = {}
    for layer, (weight, bias) in heads.items():
        tensors[f"layers.{layer}.weight"] = weight.detach().cpu().contiguous()
        if bias is not None:
            tensors[f"layers.{layer}.bias"] = bias.detach().cpu().contiguous()
    # One entry: several would come in any order, and the same heads would not make the same file.
    about = json.dumps({"format": FORMAT, **dataclasses.asdict(identity)})
    write_bytes(path, save(tensors, metadata={METADATA: about}))


def _rows(tensors: Mapping[str, torch.Tensor], parts: ModelParts) -> int:
    """Rows of a weight: those of the first, if so many vectors per KV head may be."""
    one, most = parts.kv_heads * parts.head_dim, parts.layers[0].projection.weight.shape[0]
    first = tensors.get(f"layers.{next(parts.forecastable(), 0)}.weight")
    rows = 0 if first is None or first.ndim != 2 else first.shape[0]
    return rows if rows and rows % one == 0 and most % rows == 0 else one


def read_heads(path: Path, parts: ModelParts, flag: str) -> Heads:
    """The heads of a file, checked against a model.

    Raises ForecastError, which begins with `flag`, if the file cannot be read, is none of heads, was made for another
    model, or if shapes or numbers are wrong.
    """
    from safetensors import SafetensorError, safe_open

    where = f"{flag} {path}"
    if not path.is_file():
        raise ForecastError(f"{where}: there is no such file: give none, query, or a file of trained heads")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ForecastError(
            f"{where}: not a safetensors file of heads ({' '.join(str(error).split())[:120]})"
        ) from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ForecastError(f"{where}: holds no forecast heads: make some with python -m sglang_sparse.forecast.train")
    identity = parts.identity()
    for field, own in dataclasses.asdict(identity).items():
        if about.get(field) != own:
            shown = [str(value)[:16] for value in (about.get(field, "nothing"), own)]
            raise ForecastError(
                f"{where}: was trained for another model, of {field} {shown[0]} and not {shown[1]}: train heads for "
                "this model, or use query"
            )
    rows = _rows(tensors, parts)
    expected = {f"layers.{layer}.weight": [rows, identity.hidden_size] for layer in parts.forecastable()}
    biases = {f"layers.{layer}.bias": [rows] for layer in parts.forecastable()}
    missing = sorted(set(expected) - set(tensors))
    unknown = sorted(set(tensors) - set(expected) - set(biases))
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has an unknown tensor {unknown[0]}"
        raise ForecastError(f"{where}: {what}: train heads for this model")
    for name, tensor in tensors.items():
        shape = (expected | biases)[name]
        if list(tensor.shape) != shape or not tensor.is_floating_point():
            raise ForecastError(
                f"{where}: {name} is {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, expected "
                f"{shape} of floats: train heads for this model"
            )
        if not torch.isfinite(tensor.float()).all():
            raise ForecastError(f"{where}: {name} has numbers that are not finite: train the heads anew")
    return {
        layer: (tensors[f"layers.{layer}.weight"], tensors.get(f"layers.{layer}.bias"))
        for layer in parts.forecastable()
    }
