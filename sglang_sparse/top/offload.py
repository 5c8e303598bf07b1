"""What `top` shows of an offloaded server: how much of what steps read was found on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTS = ("hits", "misses", "direct", "evictions", "missed_bytes")


def offload_counts(block: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Counts and shares of the `sparse_decode` block of `/server_info`, since the start or since `before`.

    Returns:
        `COUNTS`, `hit_rate` (hits ÷ blocks looked up), `direct_share` (blocks read from the host for want of a slot ÷
        blocks looked up) and `hidden_share` (prefetched bytes that were read ÷ these and the missed ones; None without
        a forecast); shares are None while nothing was looked up. None for a server whose KV cache is on the GPU.
    """
    now = block.get("offload")
    if now is None:
        return None
    then = (before or {}).get("offload") or {}
    counts = {name: now[name] - then.get(name, 0) for name in COUNTS}
    looked_up = counts["hits"] + counts["misses"]
    return counts | {
        "hit_rate": _share(counts["hits"], looked_up),
        "direct_share": _share(counts["direct"], looked_up),
        "hidden_share": _hidden(now, then, counts["missed_bytes"]),
    }


def offload_line(counts: Mapping[str, Any], seconds: float | None) -> str:
    """One line for the screen; `seconds` that the counts are of, None since the start."""
    if counts["hit_rate"] is None:
        return "nothing looked up"
    parts = [f"{100 * counts['hit_rate']:.1f}% of the blocks in slots"]
    if counts["direct"]:
        parts.append(f"{100 * counts['direct_share']:.1f}% read from the host")
    missed = counts["missed_bytes"] / 1e9
    parts.append(f"{missed / seconds:.2f} GB/s missed" if seconds else f"{missed:.2f} GB missed")
    if counts["hidden_share"] is not None:
        parts.append(f"{100 * counts['hidden_share']:.0f}% of misses hidden")
    return ", ".join(parts)


def _hidden(now: Mapping[str, Any], then: Mapping[str, Any], missed: int) -> float | None:
    forecast = now.get("forecast")
    if forecast is None:
        return None
    used = forecast["used_bytes"] - (then.get("forecast") or {}).get("used_bytes", 0)
    return _share(used, used + missed)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
