"""Exact paired tests of one question: did scores get worse?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def p_worse(differences: Sequence[Fraction]) -> float:
    """One-sided p value of the exact sign-flip test: how likely a sum this low is, if each sign were a coin's.

    `differences`: new score minus old score of each sample. For scores of 0 and 1 this is McNemar's exact test. 1 if
    nothing differs.
    """
    moved = [difference for difference in differences if difference]
    scale = math.lcm(*(difference.denominator for difference in moved))
    steps = [int(difference * scale) for difference in moved]
    # How many of the 2^n sign patterns give each sum; integers, so that nothing is rounded.
    counts = {0: 1}
    for step in steps:
        grown: dict[int, int] = {}
        for total, count in counts.items():
            for signed in (total + step, total - step):
                grown[signed] = grown.get(signed, 0) + count
        counts = grown
    observed = sum(steps)
    return float(Fraction(sum(count for total, count in counts.items() if total <= observed), 2 ** len(steps)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for their number, in the order given (Holm, 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def exact(score: float) -> Fraction:
    """The fraction that a score stands for: 0.3 is 3/10. RULER's scores count found words of at most a few."""
    return Fraction(score).limit_denominator(1000)
