"""The fit that training of heads starts from."""

from __future__ import annotations

import pytest
import torch

from sglang_sparse.forecast.least_squares import Sums, best_change


def tokens(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((count, 8), generator=generator)
    # As of hidden states: some channels are far larger than others, and one is never there.
    x[:, 2] *= 100
    x[:, 5] = 0
    return x


WEIGHT = torch.randn((8, 6), generator=torch.Generator().manual_seed(7))
BIAS = torch.linspace(-2, 2, 6)


def test_a_linear_map_is_found() -> None:
    x, other = tokens(400, 1), tokens(300, 2)
    change = best_change(Sums.of(x, x @ WEIGHT + BIAS), Sums.of(other, other @ WEIGHT + BIAS)).float()
    wanted = other @ WEIGHT + BIAS
    found = other @ change[:-1] + change[-1]
    assert (found - wanted).norm() < 2e-3 * wanted.norm()
    assert change[5].norm() == 0


def test_the_error_is_that_of_the_tokens() -> None:
    x = tokens(50, 3)
    missing = torch.randn((50, 6), generator=torch.Generator().manual_seed(4))
    change = torch.randn((9, 6), generator=torch.Generator().manual_seed(5)) / 100
    left = missing - x @ change[:-1] - change[-1]
    assert Sums.of(x, missing).error(change.double()) == pytest.approx(left.square().sum().item(), rel=1e-5)


def test_sums_of_parts_add_up() -> None:
    x = tokens(90, 6)
    missing = x @ WEIGHT
    whole, parts = Sums.of(x, missing), Sums.of(x[:40], missing[:40])
    parts.add(Sums.of(x[40:], missing[40:]))
    for name in ("inputs", "products", "squares"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))


def test_what_others_do_not_bear_out_is_not_learnt() -> None:
    x, other = tokens(400, 1), tokens(300, 2)
    assert not best_change(Sums.of(x, x @ WEIGHT), Sums.of(other, -(other @ WEIGHT))).any()


def test_few_tokens_are_believed_as_far_as_others_bear_them_out() -> None:
    """With fewer tokens than channels a fit without penalty would follow their noise."""
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn((64, 6), generator=generator) / 8

    def sums(count: int) -> Sums:
        x = torch.randn((count, 64), generator=generator)
        return Sums.of(x, x @ weight + torch.randn((count, 6), generator=generator))

    few, others = sums(80), sums(2000)
    plain = torch.linalg.solve(few.inputs, few.products)
    chosen = best_change(few, others)
    assert others.error(chosen) < others.error(torch.zeros_like(chosen)) < others.error(plain)
