"""Whether layers have slots as they read blocks, from what a server counted; if not, the shares that would suit it."""

from __future__ import annotations

import json
import logging

import torch
from sparse_kernels.slot_maps import TOTALS

from sglang_sparse.observe.counters import CounterWindow
from sglang_sparse.option_values import flag

logger = logging.getLogger(__name__)

STEPS = 1000
"""Steps after which a server tells once what it found."""

WORTH_TELLING = 0.02
"""Missed share of the listed blocks below which other shares would win little."""

UNEVEN = 1.25
"""A layer's share of the blocks that are read ÷ its share of the slots, from which on it has too few."""


def better_shares(totals: list[list[int]], slots: list[int]) -> list[float] | None:
    """Shares of slots by layer, as layers read blocks; None if the given ones are about right, or little is missed.

    Args:
        totals: of each layer, as `slot_maps.TOTALS` names them.
        slots: of each layer, for each KV head.
    """
    rows = [dict(zip(TOTALS, row, strict=True)) for row in totals]
    listed = [row["hits"] + row["misses"] for row in rows]
    misses = sum(row["misses"] for row in rows)
    if not sum(slots) or misses <= WORTH_TELLING * sum(listed):
        return None
    mean = sum(listed) / len(listed)
    shares = [round(each / mean, 2) for each in listed]
    if all(share * sum(slots) <= UNEVEN * own * len(slots) for share, own in zip(shares, slots, strict=True)):
        return None
    return shares


class ShareAdvice:
    """Logs better shares once, when steps enough were counted.

    Args:
        totals: `[layers, 4]` int64 on the device, only ever added to.
        slots: of each layer.
    """

    def __init__(self, totals: torch.Tensor, slots: list[int]) -> None:
        self._window = CounterWindow(totals, lambda counts: counts)
        self._seen = torch.zeros_like(totals, device="cpu")
        self._slots, self._steps, self._told = slots, 0, False

    def after(self, steps: int) -> None:
        """To be called every now and then with the decode steps since the last call; does not wait for the device."""
        if self._told:
            return
        self._steps += steps
        self._seen += self._window.read()
        if self._steps < STEPS:
            return
        self._told = True
        shares = better_shares(self._seen.tolist(), self._slots)
        if shares is not None:
            hits, misses = self._seen[:, :2].sum(0).tolist()
            logger.info(
                "Offload: %.1f%% of the blocks that were read were missed, and layers do not have slots as they read "
                "blocks. A %s FILE with this key would give them such: %s",
                100 * misses / (hits + misses),
                flag("config"),
                json.dumps({"slot_shares": shares}),
            )
