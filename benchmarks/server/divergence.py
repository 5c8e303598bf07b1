"""How far a server's next-token distributions are from another's, from what both tell of their likeliest tokens.

Greedy answers of two servers agree up to some position; until then, and at that position, both chose their token after
the same tokens, so that their distributions there can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TOP = 50
"""Likeliest tokens that are asked for at each position."""


@dataclass(frozen=True)
class Scored:
    """A greedy answer and, for each of its tokens, the log probabilities (nats) of the likeliest ones by token id."""

    tokens: list[int]
    top: list[dict[int, float]]


def kl_divergence(ours: dict[int, float], reference: dict[int, float]) -> float:
    """KL(reference || ours) in nats over the tokens that the reference names, and one outcome for all others.

    A token that ours does not name is taken to have as much there as it can have: no more than any that is named, nor
    than what these leave. Merging outcomes never raises a divergence either, so this is at most that of the whole
    distributions.
    """
    # Log probabilities are rounded: no rest may come out negative or zero.
    least = 1e-7
    unnamed = max(1 - sum(map(math.exp, ours.values())), least)
    most = math.log(min(unnamed, math.exp(min(ours.values()))))
    named = sum(math.exp(p) * (p - ours.get(token, most)) for token, p in reference.items())
    rest_p = max(1 - sum(map(math.exp, reference.values())), least)
    rest_q = max(1 - sum(math.exp(ours[token]) for token in ours.keys() & reference.keys()), least)
    return max(named + rest_p * (math.log(rest_p) - math.log(rest_q)), 0.0)


def mean_divergence(ours: Sequence[Scored], reference: Sequence[Scored]) -> tuple[float, int] | None:
    """Mean KL to the reference and the positions that it is over; None if there is none.

    The first token of an answer is left out: it comes from prefill, which is dense in every server.
    """
    values = []
    for mine, other in zip(ours, reference, strict=True):
        for place, (a, b) in enumerate(zip(mine.tokens, other.tokens, strict=True)):
            if place:
                values.append(kl_divergence(mine.top[place], other.top[place]))
            if a != b:
                break
    return (sum(values) / len(values), len(values)) if values else None
