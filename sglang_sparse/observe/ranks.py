"""One `sparse_decode` block out of those of all tensor-parallel ranks, each of which is of its own heads.

Ranks count the same steps and requests, and all of them have the same number of heads. With more ranks than KV heads a
KV head is on several ranks, each with some of its query heads and a selection for these: such a head's share is the
mean over its ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class RankState:
    """What one rank says of itself."""

    kv_heads: Sequence[int]
    """Which of the model's KV heads it has."""
    state: dict[str, Any]
    """The block of `/sparse_decode`, see `report.live_state`."""


def merged(ranks: Sequence[RankState]) -> dict[str, Any]:
    """The block of the model, from those of all its ranks in their order."""
    first = ranks[0].state
    if len(ranks) == 1:
        return first
    states = [rank.state for rank in ranks]
    changed = [RankState(rank.kv_heads, rank.state["since_change"]) for rank in ranks]
    return {
        **first,
        **_shares(ranks),
        "tp_size": len(ranks),
        "summary_bytes": sum(state["summary_bytes"] for state in states),
        "audit": _audit(first, [state["audit"] for state in states]),
        "since_change": {**first["since_change"], **_shares(changed)},
        **({"self_check": _self_check([state["self_check"] for state in states])} if "self_check" in first else {}),
    }


def _shares(ranks: Sequence[RankState]) -> dict[str, Any]:
    """Shares of what was read, over the heads of all ranks."""

    def mean(name: str) -> float | None:
        found = [rank.state[name] for rank in ranks if rank.state[name] is not None]
        return sum(found) / len(found) if found else None

    return {
        "kept_fraction": mean("kept_fraction"),
        "bytes_read_fraction": mean("bytes_read_fraction"),
        "kept_fraction_by_layer_and_head": _by_layer_and_head(ranks),
    }


def _by_layer_and_head(ranks: Sequence[RankState]) -> list[list[float]]:
    by_rank = [rank.state["kept_fraction_by_layer_and_head"] for rank in ranks]
    if not all(by_rank):
        return []
    layers = []
    for number in range(len(by_rank[0])):
        heads: dict[int, list[float]] = {}
        for rank, shares in zip(ranks, by_rank, strict=True):
            # Nothing for layers with a sliding window.
            for head, share in zip(rank.kv_heads, shares[number], strict=False):
                heads.setdefault(head, []).append(share)
        layers.append([sum(shares) / len(shares) for _, shares in sorted(heads.items())])
    return layers


def _audit(first: dict[str, Any], reports: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """All ranks audit the same steps, each for its heads: values add up, samples do not."""
    found = [report for report in reports if report is not None]
    if not found:
        return None
    by_layer: dict[str, dict[str, Any]] = {}
    for layer in sorted({layer for report in found for layer in report["by_layer"]}, key=int):
        parts = [report["by_layer"][layer] for report in found if layer in report["by_layer"]]
        count = sum(part["count"] for part in parts)
        by_layer[layer] = {
            "count": count,
            "mean": sum(part["mean"] * part["count"] for part in parts) / count,
            "histogram": {bucket: sum(part["histogram"][bucket] for part in parts) for bucket in parts[0]["histogram"]},
        }
    values = sum(layer["count"] for layer in by_layer.values())
    total = sum(layer["mean"] * layer["count"] for layer in by_layer.values())
    aim = _aim(first)
    worst = min(by_layer, key=lambda layer: by_layer[layer]["mean"] - aim(int(layer)), default=None)
    return {
        **found[0],
        "samples": max(report["samples"] for report in found),
        "mean_coverage": total / values if values else None,
        "worst_layer": None if worst is None else int(worst),
        "by_layer": by_layer,
    }


def _aim(state: dict[str, Any]) -> Callable[[int], float]:
    """The coverage asked for in a layer: the mean over its KV heads, 1 for rules that aim at none."""
    options, gamma = state["options"], state["control"]["gamma"]
    if options["rule"] != "coverage":
        return lambda layer: 1.0
    if gamma is not None:
        return lambda layer: gamma
    if options["gamma_by_head"]:
        return lambda layer: sum(options["gamma_by_head"][layer]) / len(options["gamma_by_head"][layer])
    return lambda layer: options["gamma_by_layer"][layer] if options["gamma_by_layer"] else options["gamma"]


def _self_check(checks: list[dict[str, Any]]) -> dict[str, Any]:
    """What pools hold, which is the same on all ranks, and the wrong pages and slots of the worst of them."""
    stale = [check["stale_pages"] for check in checks]
    return {
        **checks[0],
        "stale_pages": None if None in stale else max(stale),
        "wrong_slots": max(check["wrong_slots"] for check in checks),
    }
