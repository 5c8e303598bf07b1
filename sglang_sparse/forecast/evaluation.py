"""How much of what decode steps fetch would have been there already, by predictor and bytes prefetched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from .model_parts import ModelParts
from .protocol import Forecast
from .ranking import Masses, mean_shares, open_mass
from .recording import Steps

ORACLE, NONE, PREVIOUS, TRUE = "oracle", "none", "previous step", "true query"


def resident_before(kept: torch.Tensor, slots: int) -> torch.Tensor:
    """`[T, Hkv, N]` bool: blocks in a least-recently-used cache before each step.

    Args:
        kept: `[T, Hkv, N]` bool, what each step reads.
        slots: of each KV head; with 0 the cache holds what the step before read, however much that was.
    """
    steps, heads, blocks = kept.shape
    resident = torch.zeros_like(kept)
    if slots == 0:
        resident[1:] = kept[:-1]
        return resident
    last_used = torch.full((heads, blocks), -1, device=kept.device)
    index = torch.arange(blocks, device=kept.device)
    for step in range(steps):
        order = (last_used * blocks - index).argsort(-1, descending=True)
        rank = torch.empty_like(order).scatter_(-1, order, index.expand(heads, -1))
        resident[step] = (last_used >= 0) & (rank < slots)
        last_used[kept[step]] = step
    return resident


@dataclass
class Tally:
    """What one predictor did in one layer, summed over steps."""

    wanted: int = 0
    """Blocks that the steps read."""
    named: int = 0
    """Those of them that are among as many blocks as the step reads, the predictor's first choices."""
    new: int = 0
    """Blocks that the steps read and that were not resident."""
    found: dict[float, int] = field(default_factory=dict)
    """By bytes prefetched, as a multiple of the bytes that each step misses: new blocks that were prefetched."""
    found_evenly: dict[float, int] = field(default_factory=dict)
    """The same where every step prefetches as much: that multiple of what a step misses on average."""

    def recall(self) -> float:
        return self.named / self.wanted if self.wanted else math.nan

    def new_recall(self, budget: float, evenly: bool = False) -> float:
        found = self.found_evenly if evenly else self.found
        return found.get(budget, 0) / self.new if self.new else math.nan


Tallies = dict[tuple[str, int], Tally]
"""By predictor and layer."""


def _shares(
    steps: Steps, parts: ModelParts, layer: int, forecasts: Mapping[str, Forecast], masses: Masses, open_page: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each predictor's expected shares of a layer's attention, `[T, Hkv, N]`."""
    own = parts.layers[layer]
    assert own.rotary is not None
    scale = float(getattr(own.attention, "scaling", None) or parts.head_dim**-0.5)
    queries = own.projection(steps.inputs[layer]).unflatten(1, (parts.kv_heads, -1))
    queries = own.rotary(queries, steps.positions)

    def ranked(vectors: torch.Tensor) -> torch.Tensor:
        keys, candidates = steps.keys[layer], steps.candidates
        others = open_mass(vectors, keys, candidates, steps.positions, scale)
        if not open_page:
            others = torch.full_like(others, float("-inf"))
        return mean_shares(masses(vectors, keys, scale), candidates, others)

    yield PREVIOUS, ranked(torch.cat((queries[:1], queries[:-1])))
    for name, forecast in forecasts.items():
        yield name, ranked(forecast.vectors(layer, steps.inputs[layer - 1], steps.positions))
    yield TRUE, ranked(queries)


@torch.inference_mode()
def evaluate_steps(
    steps: Steps,
    parts: ModelParts,
    forecasts: Mapping[str, Forecast],
    masses: Masses,
    *,
    cache: float,
    budgets: tuple[float, ...],
    warm_up: int,
    tallies: Tallies,
    open_page: bool = True,
) -> None:
    """Adds one prompt's steps after the first `warm_up` to `tallies`.

    Args:
        cache: slots ÷ mean blocks that a step keeps in the layer; 0 for what the step before read.
        budgets: multiples of the missed bytes.
        open_page: whether shares are of the open page's tokens too, as they are but for scores by strided means.
    """
    for layer in parts.forecastable():
        kept = steps.kept[layer]
        mean_set = kept.sum(-1).double().mean().item()
        slots = max(1, round(cache * mean_set)) if cache else 0
        resident = resident_before(kept, slots)
        new = (kept & ~resident)[warm_up:]
        counts = new.sum((1, 2))
        even = torch.full_like(counts, 1).mul(counts.double().mean()) if len(counts) else counts
        wanted = kept[warm_up:].sum(-1)
        absent = (steps.candidates[:, None] & ~resident)[warm_up:].flatten(1)
        found_by: dict[str, tuple[torch.Tensor, int]] = {
            # What it asks for is what is missing, so that its first choices are all right.
            ORACLE: (
                torch.arange(1, absent.shape[1] + 1, device=kept.device).minimum(counts[:, None]),
                int(wanted.sum()),
            ),
            NONE: (torch.zeros_like(absent, dtype=torch.long), 0),
        }
        for name, shares in _shares(steps, parts, layer, forecasts, masses, open_page):
            chosen = kept.gather(-1, shares.argsort(-1, descending=True))[warm_up:].cumsum(-1)
            named = torch.where(wanted > 0, chosen.gather(-1, (wanted - 1).clamp_min(0)[..., None])[..., 0], 0)
            order = shares[warm_up:].flatten(1).masked_fill(~absent, -1).argsort(-1, descending=True)
            found_by[name] = (new.flatten(1).gather(1, order).cumsum(1), int(named.sum()))
        for name, (found, named_blocks) in found_by.items():
            tally = tallies.setdefault((name, layer), Tally())
            tally.wanted += int(wanted.sum())
            tally.named += named_blocks
            tally.new += int(counts.sum())
            for budget in budgets:
                for into, of in ((tally.found, counts.double()), (tally.found_evenly, even.double())):
                    into[budget] = into.get(budget, 0) + _within(found, (budget * of).ceil().long())


def _within(found: torch.Tensor, budget: torch.Tensor) -> int:
    """New blocks among the first `budget` (`[T]`) of each row of running totals `found` (`[T, n]`)."""
    last = (budget.clamp_max(found.shape[1]) - 1).clamp_min(0)[:, None]
    return int(torch.where(budget > 0, found.gather(1, last)[:, 0], 0).sum())


def predictors(tallies: Tallies) -> list[str]:
    """Names in the order of tables: what is asked of a predictor grows downwards."""
    names = {name for name, _ in tallies}
    last = [TRUE, ORACLE]
    first = [NONE, PREVIOUS]
    return (
        [*first, *(name for name in dict.fromkeys(n for n, _ in tallies) if name not in first + last), *last]
        if names
        else []
    )


def layer_mean(values: list[float]) -> float:
    """The mean over layers that have one."""
    given = [value for value in values if not math.isnan(value)]
    return sum(given) / len(given) if given else math.nan


def pooled(tallies: Tallies, name: str, budget: float, evenly: bool = False) -> float:
    """Found ÷ new blocks over all layers, so that those that miss much count as much."""
    own = [tally for (who, _), tally in tallies.items() if who == name]
    new = sum(tally.new for tally in own)
    found = sum((tally.found_evenly if evenly else tally.found).get(budget, 0) for tally in own)
    return found / new if new else math.nan
