"""What the live audit found so far: histograms of coverage by layer, and a warning when coverage stays low."""

from __future__ import annotations

import bisect
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

BUCKETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 1.0)
"""Upper bounds of the histograms' buckets, inclusive."""

WINDOW = 64
"""Samples whose mean coverage is compared with gamma; at the default rate, those of some 64,000 steps."""

MARGIN = 0.02
"""How far coverage may lie below gamma on average over the window. A single sample may lie further below."""

WORST_LAYERS = 3
"""Layers that the warning names, at most."""

_UNREAD = 1024
"""Samples kept for the metrics exporter, which reads them after each step."""


class _LayerHistory:
    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.buckets = [0] * len(BUCKETS)

    @property
    def mean(self) -> float:
        return self.total / self.count

    def add(self, values: list[float]) -> None:
        self.count += len(values)
        self.total += sum(values)
        for value in values:
            self.buckets[bisect.bisect_left(BUCKETS, value)] += 1


class CoverageHistory:
    """Coverage by layer since the start, one value a KV head and sample.

    Args:
        gamma_of: the coverage that the rule aims at in a layer, the mean over its KV heads if they differ; None if it
            aims at none: then there is no warning.
        asked_by: what users call the option that `gamma_of` comes from.
    """

    def __init__(self, gamma_of: Callable[[int], float] | None, asked_by: str = "--sparse-decode-gamma") -> None:
        self._gamma_of = gamma_of
        self._asked_by = asked_by
        self._layers: dict[int, _LayerHistory] = {}
        self._samples = 0
        self._shortfalls: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        """Layer, and gamma less the coverage, of the last samples: means over the layer's KV heads."""
        self._low = False
        self._unread: deque[tuple[int, list[float]]] = deque(maxlen=_UNREAD)

    def add(self, layer: int, coverage: list[float]) -> None:
        """Adds a sample: the coverage of each KV head, in shares. One that is not finite throughout is dropped."""
        if not all(math.isfinite(value) for value in coverage):
            return
        # Sums of rounded shares may pass 1 by a little.
        values = [min(max(value, 0.0), 1.0) for value in coverage]
        self._samples += 1
        self._layers.setdefault(layer, _LayerHistory()).add(values)
        self._unread.append((layer, values))
        if self._gamma_of is not None:
            self._shortfalls.append((layer, self._gamma_of(layer) - sum(values) / len(values)))
            self._watch()

    def take_unread(self) -> list[tuple[int, list[float]]]:
        """Layer and coverage of the samples since the last call, at most 1024."""
        samples = list(self._unread)
        self._unread.clear()
        return samples

    def report(self) -> dict[str, Any]:
        """What was found, in JSON types; `histogram` maps a bucket's upper bound to the values in it."""
        values = sum(layer.count for layer in self._layers.values())
        total = sum(layer.total for layer in self._layers.values())
        worst = self._worst_layers()
        return {
            "samples": self._samples,
            "mean_coverage": total / values if values else None,
            "worst_layer": worst[0] if worst else None,
            "by_layer": {
                str(number): {
                    "count": layer.count,
                    "mean": layer.mean,
                    "histogram": dict(zip(map(str, BUCKETS), layer.buckets, strict=True)),
                }
                for number, layer in sorted(self._layers.items())
            },
        }

    def _worst_layers(self) -> list[int]:
        """Layers from the one whose coverage lies furthest below what the rule aims at, if it aims at one."""
        aim = self._gamma_of or (lambda layer: 1.0)
        return sorted(self._layers, key=lambda number: self._layers[number].mean - aim(number))

    def _watch(self) -> None:
        """Warns once when coverage, over a full window, falls below gamma by more than the margin."""
        if len(self._shortfalls) < WINDOW:
            return
        shortfall = sum(short for _, short in self._shortfalls) / WINDOW
        was_low, self._low = self._low, shortfall > MARGIN
        if self._low and not was_low:
            by_layer: dict[int, list[float]] = {}
            for layer, short in self._shortfalls:
                by_layer.setdefault(layer, []).append(short)
            means = {layer: sum(shorts) / len(shorts) for layer, shorts in by_layer.items()}
            worst = sorted(means, key=lambda layer: -means[layer])[:WORST_LAYERS]
            logger.warning(
                "Sparse decode: over the last %d audited samples, the blocks read cover %.3f less of the attention "
                "mass than %s asks for (means over KV heads; tolerated: %g): raise it, use --sparse-decode-estimator "
                "thumbnail and --sparse-decode-thumbnail-bits 4 if it is another or fewer, or add the worst layers to "
                "--sparse-decode-dense-layers: %s (short by %s)",
                WINDOW,
                shortfall,
                self._asked_by,
                MARGIN,
                ",".join(map(str, sorted(worst))),
                ", ".join(f"{means[layer]:.3f} in layer {layer}" for layer in worst),
            )
