"""What `top` shows, as plain data: the same for the screen and for `--json`."""

from __future__ import annotations

from typing import Any

from sglang_sparse.top.offload import offload_counts
from sglang_sparse.top.server import Totals


def summarise(now: Totals, before: Totals | None) -> dict[str, Any]:
    """Totals since the start, and of the interval since `before`; JSON types only.

    A server that restarted in between has no interval.
    """
    block = now.block
    if before is not None and block["steps"] < before.block["steps"]:
        before = None
    return {
        "model": now.model,
        "running_requests": now.running,
        "queued_requests": now.queued,
        "summary_bytes": block["summary_bytes"],
        "options": _current_options(block),
        "is_on": block.get("control", {}).get("enabled", True),
        "since_start": _shares(block) | {"time_shares": _time_shares(now.phase_seconds)},
        "interval": _interval(now, before) if before is not None else None,
        "coverage": _coverage(block),
    }


def _current_options(block: dict[str, Any]) -> dict[str, Any]:
    """The options that the server was started with, with the gamma or delta that it was given since then."""
    control = block.get("control", {})
    options: dict[str, Any] = dict(block["options"])
    if control.get("gamma") is not None:
        options |= {"gamma": control["gamma"], "gamma_by_layer": [], "gamma_by_head": []}
    if control.get("delta") is not None:
        options["delta"] = control["delta"]
    return options


def _shares(block: dict[str, Any]) -> dict[str, Any]:
    heads = block["kept_fraction_by_layer_and_head"]
    return {
        "steps": block["steps"],
        "kept_fraction": block["kept_fraction"],
        "bytes_read_fraction": block["bytes_read_fraction"],
        "kept_fraction_by_layer": [sum(layer) / len(layer) for layer in heads],
        "offload": offload_counts(block),
    }


def _interval(now: Totals, before: Totals) -> dict[str, Any]:
    """Shares are weighed by blocks and bytes by tokens: so differences of their products are the interval's."""
    seconds = now.seconds - before.seconds
    new, old = now.block, before.block
    layers = _difference_of_shares(
        _shares(new)["kept_fraction_by_layer"], new["blocks"], _shares(old)["kept_fraction_by_layer"], old["blocks"]
    )
    kept = _difference_of_shares([new["kept_fraction"]], new["blocks"], [old["kept_fraction"]], old["blocks"])
    read = _difference_of_shares(
        [new["bytes_read_fraction"]], new["tokens"], [old["bytes_read_fraction"]], old["tokens"]
    )
    phases = None
    if now.phase_seconds is not None:
        earlier = before.phase_seconds or {}
        phases = {name: max(0.0, value - earlier.get(name, 0.0)) for name, value in now.phase_seconds.items()}
    return {
        "seconds": seconds,
        "tokens_per_second": (new["decoded_tokens"] - old["decoded_tokens"]) / seconds if seconds > 0 else None,
        "steps": new["steps"] - old["steps"],
        "kept_fraction": kept[0] if kept else None,
        "bytes_read_fraction": read[0] if read else None,
        "kept_fraction_by_layer": layers,
        "time_shares": _time_shares(phases),
        "offload": offload_counts(new, old),
    }


def _difference_of_shares(new: list[Any], new_weight: int, old: list[Any], old_weight: int) -> list[float]:
    """Weighted shares of what was added; empty if nothing was."""
    if new_weight <= old_weight:
        return []
    old = old if old_weight else [0.0] * len(new)
    return [(a * new_weight - b * old_weight) / (new_weight - old_weight) for a, b in zip(new, old, strict=True)]


def _time_shares(phases: dict[str, float] | None) -> dict[str, float] | None:
    total = sum((phases or {}).values())
    return {name: value / total for name, value in phases.items()} if phases and total else None


def _coverage(block: dict[str, Any]) -> dict[str, Any] | None:
    """What the live audit found; None if it is off."""
    audit = block["audit"]
    if audit is None:
        return None
    return {
        "samples": audit["samples"],
        "mean": audit["mean_coverage"],
        "worst_layer": audit["worst_layer"],
        "by_layer": {number: layer["mean"] for number, layer in audit["by_layer"].items()},
    }
