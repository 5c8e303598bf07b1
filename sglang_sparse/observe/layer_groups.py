"""Readings by thirds of the model: what differs between layers, without a series for each of them."""

from __future__ import annotations

import dataclasses

from sglang_sparse.observe.counters import Reading

LAYER_GROUPS = ("first", "middle", "last")
"""Thirds of the layers: layer `i` of `n` is in the one of index `3 * i // n`. Fewer than three leave some empty."""


def layer_group(layer: int, layers: int) -> str:
    """The third that a layer is in."""
    return LAYER_GROUPS[3 * layer // layers]


@dataclasses.dataclass
class GroupReading:
    """What the layers of one group read over some steps."""

    kv_bytes: float = 0.0
    """What dense decode would have read."""
    kept_bytes: float = 0.0
    """KV bytes of the blocks that were read."""
    scan_bytes: float = 0.0
    """Bytes read to choose them."""

    @property
    def kept_fraction(self) -> float:
        return self.kept_bytes / self.kv_bytes

    @property
    def bytes_read_fraction(self) -> float:
        return (self.kept_bytes + self.scan_bytes) / self.kv_bytes


def by_layer_group(reading: Reading) -> dict[str, GroupReading]:
    """Sums of a reading by layer group, without layers that do not count; empty if no step was counted."""
    layers = len(reading.kept_by_layer_and_head)
    groups: dict[str, GroupReading] = {}
    for layer, heads in enumerate(reading.kept_by_layer_and_head):
        if not heads:
            continue
        group = groups.setdefault(layer_group(layer, layers), GroupReading())
        group.kv_bytes += reading.kv_bytes_by_layer
        group.kept_bytes += reading.block_share * reading.kv_bytes_by_layer * sum(heads) / len(heads)
        group.scan_bytes += reading.scan_bytes_by_layer[layer]
    return groups
