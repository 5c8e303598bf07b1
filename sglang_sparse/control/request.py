"""What one request may ask for: `custom_params` of SGLang's sampling parameters.

    {"sparse_decode": {"gamma": 0.98}}    a coverage of its own, in all layers and KV heads that select
    {"sparse_decode": {"delta": 8}}       a delta of its own, with rule top-delta
    {"sparse_decode": {"dense": true}}    every block

SGLang's scheduler decodes `custom_params` by a schema, and ends when a value does not fit it. So all of them are
checked where requests arrive, not only those of sparse decode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglang_sparse.control.values import check_delta, check_gamma, check_switch
from sglang_sparse.option_values import OptionsError
from sglang_sparse.options import SparseDecodeOptions

KEY = "sparse_decode"
"""The key of `custom_params`, of a response's `meta_info` and of a stream's `usage`."""

KEEP_ALL = math.inf
"""A threshold that makes every rule keep all blocks: above any coverage and any number of blocks."""

_FIELDS = ("gamma", "delta", "dense")
_SCALARS = (bool, int, float, str, type(None))
_INTEGERS = (-(2**63), 2**64 - 1)


def check_custom_params(value: Any, options: SparseDecodeOptions) -> None:
    """Raises OptionsError, which names the field, unless SGLang can carry `custom_params` to its scheduler.

    It carries scalars, lists of scalars, and objects of scalars. Ours must also be known and in range.
    """
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise OptionsError('custom_params must be an object such as {"sparse_decode": {"gamma": 0.98}}')
    for name, item in value.items():
        _check_item(f"custom_params.{name}", name, item)
    if KEY in value:
        _check_sparse_decode(value[KEY], options)


def threshold(custom_params: Any) -> float | None:
    """What checked `custom_params` ask of the rule in every layer and KV head; None if they leave it to the server."""
    asked = custom_params.get(KEY) if isinstance(custom_params, Mapping) else None
    if not isinstance(asked, Mapping):
        return None
    if asked.get("dense") is True:
        return KEEP_ALL
    # Only one of them goes with the server's rule.
    own = asked.get("gamma", asked.get("delta"))
    return None if own is None else float(own)


def _check_sparse_decode(asked: Any, options: SparseDecodeOptions) -> None:
    field = f"custom_params.{KEY}"
    if asked is None:
        return
    if not isinstance(asked, Mapping):
        raise OptionsError(f'{field} must be an object such as {{"gamma": 0.98}} or {{"dense": true}}')
    unknown = [name for name in asked if name not in _FIELDS]
    if unknown:
        raise OptionsError(f"{field}.{unknown[0]} is unknown: known are {', '.join(_FIELDS)}")
    dense = "dense" in asked and check_switch(f"{field}.dense", asked["dense"])
    for name, check in (("gamma", check_gamma), ("delta", check_delta)):
        if name in asked:
            check(f"{field}.{name}", asked[name], options)
            if dense:
                raise OptionsError(f"{field}.{name} has no effect with {field}.dense: remove one of them")


def _check_item(field: str, name: Any, value: Any) -> None:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_scalar(f"{field}[{index}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_text(f"{field}.{key}", key)
            _check_scalar(f"{field}.{key}", item)
    else:
        _check_scalar(field, value)
    _check_text(field, name)


def _check_scalar(field: str, value: Any) -> None:
    if not isinstance(value, _SCALARS):
        kind = "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, (list, tuple)) else ""
        raise OptionsError(
            f"{_printable(field)} is {kind or type(value).__name__}: custom_params may hold scalars, lists of scalars "
            "and objects of scalars, nothing deeper"
        )
    if isinstance(value, int) and not _INTEGERS[0] <= value <= _INTEGERS[1]:
        raise OptionsError(f"{_printable(field)} is an integer beyond 64 bits: give it as a string")
    if isinstance(value, str):
        _check_text(field, value)


def _check_text(field: str, text: Any) -> None:
    """SGLang sends keys and strings as UTF-8, which has no lone surrogates."""
    if not isinstance(text, str):
        raise OptionsError(f"{_printable(field)}: keys in custom_params must be strings")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionsError(f"{_printable(field)} holds a lone surrogate, which is no text") from None


def _printable(field: str) -> str:
    return field.encode(errors="backslashreplace").decode()
