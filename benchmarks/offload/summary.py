"""What traces say about a cache of blocks: hit rates by size and policy, and what differs between layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .recording import BlockTrace
from .simulation import AGES, clock, lru, new_blocks

SIZES = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Slots ÷ mean blocks kept of the same row."""

Sizes = list[torch.Tensor]
"""Slots of each row, for each of the sizes."""


def _each_size(rows: torch.Tensor, slots: Sizes, **more: Any) -> list[torch.Tensor]:
    return [clock(rows, size, **more) for size in slots]


POLICIES: dict[str, Callable[[torch.Tensor, Sizes], list[torch.Tensor]]] = {
    "lru": lru,
    "clock": _each_size,
    "clock by age": partial(_each_size, ages=AGES),
}

SHARES = ("row", "layer", "equal")
"""How the same number of slots is shared out: by each row's mean set, by each layer's, or equally."""


@dataclass
class Rates:
    """Hits and accesses over prompts: of all steps, and of those after the warm-up."""

    hits: torch.Tensor
    accesses: torch.Tensor
    warm_hits: torch.Tensor
    warm_accesses: torch.Tensor
    """Each `[R]`."""

    @classmethod
    def of(cls, hits: torch.Tensor, accesses: torch.Tensor, warm_up: int) -> Rates:
        """From `[steps, R]`."""
        return cls(hits.sum(0), accesses.sum(0), hits[warm_up:].sum(0), accesses[warm_up:].sum(0))

    def __add__(self, other: Rates) -> Rates:
        return Rates(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))

    @property
    def all_steps(self) -> float:
        return (self.hits.sum() / self.accesses.sum().clamp_min(1)).item()

    @property
    def warm(self) -> float:
        return (self.warm_hits.sum() / self.warm_accesses.sum().clamp_min(1)).item()


def slots_for(mean_set: torch.Tensor, heads: int, size: float, share: str) -> torch.Tensor:
    """Slots of each row, about `size` times the sum of `mean_set [R]` in all; rows are layer-major."""
    by_layer = mean_set.view(-1, heads)
    given = {
        "row": mean_set,
        "layer": by_layer.mean(1, keepdim=True).expand_as(by_layer).flatten(),
        "equal": mean_set.mean().expand_as(mean_set),
    }[share]
    return (given * size).round().long()


def summarise(traces: list[BlockTrace], warm_up: int, device: str = "cpu") -> dict[str, Any]:
    """All figures of one setting as a JSON object; each prompt has a cache of its own, which starts empty. Caches are
    simulated on `device`."""
    heads = traces[0].kept.shape[2]
    kept = sum((t.rows.sum(-1).sum(0) for t in traces), torch.tensor(0))
    steps = sum(len(t.kept) for t in traces)
    mean_set = kept / steps
    blocks = torch.cat([t.blocks for t in traces]).double().mean().item()
    fresh = sum((new_blocks(t.rows).sum(0) for t in traces), torch.tensor(0))
    later = sum((t.rows[1:].sum(-1).sum(0) for t in traces), torch.tensor(0))
    rates: dict[str, dict[str, dict[str, list[float]]]] = {}
    layers_at_2: list[float] = []
    for share in SHARES:
        for policy, simulate in POLICIES.items():
            if share != "row" and policy != "lru":
                continue
            totals: list[Rates | None] = [None] * len(SIZES)
            for trace in traces:
                rows = trace.rows.to(device)
                accesses = rows.sum(-1)
                own = accesses.double().mean(0)
                made = simulate(rows, [slots_for(own, heads, size, share) for size in SIZES])
                for index, hits in enumerate(made):
                    rates_of = Rates.of(hits.cpu(), accesses.cpu(), warm_up)
                    before = totals[index]
                    totals[index] = rates_of if before is None else before + rates_of
            found = [total for total in totals if total is not None]
            rates.setdefault(share, {})[policy] = {
                "all_steps": [each.all_steps for each in found],
                "warm": [each.warm for each in found],
            }
            if (share, policy) == ("row", "lru"):
                at_2 = found[SIZES.index(2.0)]
                by_layer = at_2.warm_hits.view(-1, heads).sum(1) / at_2.warm_accesses.view(-1, heads).sum(1)
                layers_at_2 = by_layer.tolist()
    previous = (later.sum() - fresh.sum()) / later.sum()
    return {
        "steps": steps,
        "mean_blocks": blocks,
        "kept": (mean_set.mean() / blocks).item(),
        "new_of_kept": (fresh.sum() / later.sum()).item(),
        "new_blocks_a_step": (fresh.sum() / (steps - len(traces)) / len(mean_set)).item(),
        "previous_step_only": previous.item(),
        "sizes": list(SIZES),
        "rates": rates,
        "by_layer": {
            "mean_set": mean_set.view(-1, heads).mean(1).tolist(),
            "new_of_kept": (fresh.view(-1, heads).sum(1) / later.view(-1, heads).sum(1).clamp_min(1)).tolist(),
            "lru_warm_at_2": layers_at_2,
        },
        "by_head": {"mean_set": mean_set.view(-1, heads).tolist()},
    }
