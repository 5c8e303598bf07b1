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

POLICIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "lru": lru,
    "clock": clock,
    "clock by age": partial(clock, ages=AGES),
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


def summarise(traces: list[BlockTrace], warm_up: int) -> dict[str, Any]:
    """All figures of one setting as a JSON object; each prompt has a cache of its own, which starts empty."""
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
            entry = rates.setdefault(share, {}).setdefault(policy, {"all_steps": [], "warm": []})
            for size in SIZES:
                total = None
                for trace in traces:
                    own = trace.rows.sum(-1).double().mean(0)
                    made = Rates.of(
                        simulate(trace.rows, slots_for(own, heads, size, share)), trace.rows.sum(-1), warm_up
                    )
                    total = made if total is None else total + made
                assert total is not None
                entry["all_steps"].append(total.all_steps)
                entry["warm"].append(total.warm)
                if (share, policy, size) == ("row", "lru", 2.0):
                    by_layer = total.warm_hits.view(-1, heads).sum(1) / total.warm_accesses.view(-1, heads).sum(1)
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
