"""Checks of what callers may ask of a running server: each message names the field and says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sglang_sparse.option_values import LARGEST, OptionsError, flag
from sglang_sparse.options import SparseDecodeOptions

Change = bool | float | None


def check_switch(field: str, value: Any) -> bool:
    """`value`, if it is true or false; raises OptionsError otherwise."""
    if not isinstance(value, bool):
        raise OptionsError(f"{field} is {_shown(value)}: give true or false")
    return value


def check_gamma(field: str, value: Any, options: SparseDecodeOptions) -> float:
    """A coverage above 0 and at most 1; raises OptionsError if it is none, or if the server's rule aims at none."""
    if not _is_number(value) or not 0 < value <= 1:
        raise OptionsError(f"{field} is {_shown(value)}: give a share of attention mass above 0 and at most 1")
    if options.rule != "coverage":
        raise OptionsError(
            f"{field} has no effect with {flag('rule')} {options.rule}: "
            f"remove it, or start with {flag('rule')} coverage"
        )
    if options.lowest_gamma == 1:
        raise OptionsError(
            f"{field} has no effect on a server started with {options.gamma_name} 1, which keeps no summaries: "
            "start with a lower one"
        )
    return float(value)


def check_delta(field: str, value: Any, options: SparseDecodeOptions) -> float:
    """Nats above 0; raises OptionsError if they are none, or if the server's rule has no use for them."""
    # Beyond float32 it could not be written to the device.
    if not _is_number(value) or not 0 < value <= LARGEST:
        raise OptionsError(f"{field} is {_shown(value)}: give a number of nats above 0")
    if options.rule != "top-delta":
        raise OptionsError(
            f"{field} has no effect with {flag('rule')} {options.rule}: "
            f"remove it, or start with {flag('rule')} top-delta"
        )
    return float(value)


def _check_enabled(value: Any, options: SparseDecodeOptions) -> bool:
    return check_switch("enabled", value)


def _check_gamma(value: Any, options: SparseDecodeOptions) -> float | None:
    return None if value is None else check_gamma("gamma", value, options)


def _check_delta(value: Any, options: SparseDecodeOptions) -> float | None:
    return None if value is None else check_delta("delta", value, options)


def _check_audit_rate(value: Any, options: SparseDecodeOptions) -> float:
    if not _is_number(value) or not 0 <= value <= 1:
        raise OptionsError(f"audit_rate is {_shown(value)}: give a share of decode steps from 0 to 1")
    if value and not options.audit_rate:
        raise OptionsError(
            f"audit_rate cannot be raised on a server started with {flag('audit_rate')} 0: start with a rate above 0"
        )
    return float(value)


CHANGES: dict[str, Callable[[Any, SparseDecodeOptions], Change]] = {
    "enabled": _check_enabled,
    "gamma": _check_gamma,
    "delta": _check_delta,
    "audit_rate": _check_audit_rate,
}
"""What can be changed for all requests, and how each value is checked. `gamma` and `delta` null are what the
server started with."""


def check_changes(body: Mapping[str, Any], options: SparseDecodeOptions) -> dict[str, Change]:
    """`body`, checked: changes by name. Raises OptionsError if one is unknown or wrong, or if there are none.

    Args:
        options: what the server was started with.
    """
    for name in body:
        if name not in CHANGES:
            raise OptionsError(f"unknown key {_shown(name)}: known keys are {', '.join(CHANGES)}")
    if not body:
        raise OptionsError(f"nothing to change: give one of {', '.join(CHANGES)}")
    return {name: CHANGES[name](value, options) for name, value in body.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """`value` as an error message shows it: JSON where it is JSON, one line, not long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
