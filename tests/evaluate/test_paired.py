"""The exact tests against known numbers, and against counting every sign pattern."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sparse.evaluate.paired import exact, holm, p_worse


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [(0, 0, 1.0), (0, 4, 1 / 16), (0, 5, 1 / 32), (5, 0, 1.0), (2, 10, 79 / 4096), (3, 3, 42 / 64)],
)
def test_known_p_values_of_mcnemars_exact_test(better: int, worse: int, p: float) -> None:
    differences = [Fraction(1)] * better + [Fraction(-1)] * worse + [Fraction(0)] * 30
    assert p_worse(differences) == pytest.approx(p, rel=1e-12)


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(0, 40))
def test_scores_of_zero_and_one_give_the_binomial_test(better: int, worse: int) -> None:
    from scipy.stats import binomtest

    if better + worse == 0:
        return
    expected = binomtest(worse, better + worse, alternative="greater").pvalue
    assert p_worse([Fraction(1)] * better + [Fraction(-1)] * worse) == pytest.approx(expected, rel=1e-9)


@settings(deadline=None)
@given(st.lists(st.fractions(-1, 1, max_denominator=10), max_size=9))
def test_fractional_scores_give_the_share_of_sign_patterns(differences: list[Fraction]) -> None:
    sums = [
        sum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in product((-1, 1), repeat=len(differences))
    ]
    expected = sum(total <= sum(differences) for total in sums) / len(sums)
    assert p_worse(differences) == pytest.approx(expected, rel=1e-12)


def test_many_samples_of_mixed_scores_stay_exact() -> None:
    differences = [Fraction(-1, 10)] * 200 + [Fraction(1, 3)] * 60 + [Fraction(-1, 5)] * 40
    assert sum(differences) < 0
    assert 0.001 < p_worse(differences) < 0.05
    assert p_worse([-difference for difference in differences]) > 0.95


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_scores_become_the_fractions_that_they_stand_for() -> None:
    assert exact(0.3) == Fraction(3, 10)
    assert exact(2 / 3) == Fraction(2, 3)
    # As lm-eval adds them up.
    assert exact(sum([1.0, 1.0, 0.0]) / 3 / 1) == Fraction(2, 3)
