"""Gamma can be given once for the model, for each layer, or for each KV head: their values, and which one wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_sparse.option_values import OptionsError, flag

FIELDS = ("gamma", "gamma_by_layer", "gamma_by_head")
"""Options that say the same thing in different ways: a source gives one of them at most."""

GammaByHead = tuple[tuple[float, ...], ...]
"""`[layers][KV heads]`."""


def _are_shares(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v <= 1 for v in values
    )


def by_layer(value: Any) -> tuple[float, ...]:
    """Gammas from a sequence of numbers or a text such as `0.95,0.9`."""
    problem = OptionsError(
        f"{flag('gamma_by_layer')} is {value!r}: give one share above 0 and at most 1 for each layer, such as 0.95,0.9"
    )
    if isinstance(value, str):
        try:
            value = [float(part) for part in value.split(",")] if value else []
        except ValueError:
            raise problem from None
    if not _are_shares(value):
        raise problem
    return tuple(float(v) for v in value)


def by_head(value: Any) -> GammaByHead:
    """Gammas from a list for each layer, with a number for each KV head."""
    key = "config key 'gamma_by_head'"
    needed = "give a list for each layer, with one share above 0 and at most 1 for each KV head"
    if not isinstance(value, (list, tuple)):
        raise OptionsError(f"{key} is {value!r}: {needed}")
    for layer, gammas in enumerate(value):
        if not _are_shares(gammas) or not gammas:
            raise OptionsError(f"{key} has {gammas!r} for layer {layer}: {needed}")
        if len(gammas) != len(value[0]):
            raise OptionsError(
                f"{key} has {len(value[0])} gammas for layer 0 and {len(gammas)} for layer {layer}: {needed}"
            )
    return tuple(tuple(float(gamma) for gamma in gammas) for gammas in value)


def check_shapes(layer_gammas: tuple[float, ...], head_gammas: GammaByHead, layers: int, kv_heads: int) -> None:
    """Raises OptionsError if what is given by layer or by head does not fit a model of `layers` and `kv_heads`."""
    if layer_gammas and len(layer_gammas) != layers:
        raise OptionsError(
            f"{flag('gamma_by_layer')} has {len(layer_gammas)} values, but the model has {layers} layers"
        )
    if head_gammas and (len(head_gammas), len(head_gammas[0])) != (layers, kv_heads):
        raise OptionsError(
            f"config key 'gamma_by_head' is for {len(head_gammas)} layers of {len(head_gammas[0])} KV heads, but the "
            f"model has {layers} layers of {kv_heads}: calibrate for this model, or remove the key"
        )


def one_gamma(values: dict[str, Any], source: str) -> dict[str, Any]:
    """`values` as they are; raises OptionsError if they give gamma in more than one way."""
    given = [name for name in FIELDS if name in values]
    if len(given) > 1:
        raise OptionsError(f"{source}: give {given[0]} or {given[1]}, not both")
    return values


def drop_overridden(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    """Removes from `below` the gammas that `above`, which wins, gives in another way or has no use for."""
    if any(name in above for name in FIELDS):
        for name in FIELDS:
            below.pop(name, None)
    if above.get("rule", "coverage") != "coverage":
        below.pop("gamma_by_layer", None)
        below.pop("gamma_by_head", None)
