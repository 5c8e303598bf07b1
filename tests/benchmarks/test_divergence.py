"""The divergence of two servers from their likeliest tokens."""

from __future__ import annotations

import pytest
import torch

from benchmarks.server.divergence import Scored, kl_divergence, mean_divergence


def top(logits: torch.Tensor, count: int) -> dict[int, float]:
    values, tokens = logits.double().log_softmax(-1).topk(count)
    return dict(zip(tokens.tolist(), values.tolist(), strict=True))


def test_of_whole_distributions_it_is_the_divergence() -> None:
    torch.manual_seed(0)
    reference, ours = torch.randn(2, 30, dtype=torch.float64)
    exact = torch.nn.functional.kl_div(
        ours.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="sum"
    ).item()
    assert kl_divergence(top(ours, 30), top(reference, 30)) == pytest.approx(exact, rel=1e-4)


def test_of_parts_it_is_never_more_and_never_negative() -> None:
    torch.manual_seed(1)
    for _ in range(50):
        reference = torch.randn(200, dtype=torch.float64) * 3
        ours = reference + torch.randn(200, dtype=torch.float64) * 0.3
        whole = kl_divergence(top(ours, 200), top(reference, 200))
        assert 0 <= kl_divergence(top(ours, 50), top(reference, 50)) <= whole * (1 + 1e-9) + 1e-9
    assert kl_divergence({1: -0.1}, {2: -0.1}) > 1
    assert kl_divergence({1: -0.01, 3: -5.0}, {2: -0.01, 4: -5.0}) > 1
    assert kl_divergence({1: 0.0}, {1: 0.0}) == 0


def test_positions_end_behind_the_first_difference_and_prefill_is_left_out() -> None:
    same = {1: -0.1, 2: -3.0}
    other = {1: -0.5, 2: -1.2}
    ours = Scored([1, 2, 3, 4], [other, same, other, other])
    reference = Scored([1, 2, 9, 4], [same, same, same, same])
    mean = mean_divergence([ours], [reference])
    assert mean is not None
    # Position 0 is prefill's; 1 is equal, 2 differs for the first time; 3 follows other tokens.
    assert mean == (pytest.approx(kl_divergence(other, same) / 2), 2)
    assert mean_divergence([Scored([5], [same])], [Scored([5], [same])]) is None
    assert mean_divergence([], []) is None
