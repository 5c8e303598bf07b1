"""What heads are trained on, against plain sums."""

from __future__ import annotations

import pytest
import torch

from sglang_sparse.forecast.distillation import (
    block_log_masses,
    choosable,
    divergence,
    group_log_shares,
    recall,
)

BLOCK, SCALE = 4, 0.25


def test_masses_are_sums_over_the_tokens_up_to_the_query() -> None:
    torch.manual_seed(0)
    keys, vectors = torch.randn(10, 2, 8), torch.randn(3, 2, 3, 8)
    positions = torch.tensor([0, 5, 9])
    made = block_log_masses(vectors, keys, positions, scale=SCALE, block=BLOCK)
    assert made.shape == (3, 2, 3, 3)
    for n, position in enumerate(positions.tolist()):
        for h in range(2):
            scores = (vectors[n, h] @ keys[: position + 1, h].T * SCALE).exp()
            for j in range(3):
                mass = scores[:, j * BLOCK : (j + 1) * BLOCK].sum(-1)
                expected = mass.log() if mass.numel() and j * BLOCK <= position else None
                if expected is None:
                    assert (made[n, h, :, j] < -1e29).all()
                else:
                    torch.testing.assert_close(made[n, h, :, j], expected)


def test_gradients_are_finite_although_most_blocks_are_ahead() -> None:
    vectors = torch.randn(2, 1, 1, 8, requires_grad=True)
    positions = torch.tensor([11, 23])
    valid = choosable(positions, 32, block=BLOCK, sink=4, window=4)
    guess = group_log_shares(block_log_masses(vectors, torch.randn(32, 1, 8), positions, scale=1.0, block=BLOCK), valid)
    true = torch.randn(2, 1, 8).masked_fill(~valid[:, None], -1e30).log_softmax(-1)
    divergence(true, guess, valid, top=0.5).backward()
    assert vectors.grad is not None
    assert torch.isfinite(vectors.grad).all()
    assert vectors.grad.abs().sum() > 0


def test_sinks_and_latest_tokens_are_no_choice() -> None:
    # 24 tokens; the query at 19 always reads tokens 0 to 5 and from 13 on.
    valid = choosable(torch.tensor([19, 3]), 24, block=BLOCK, sink=6, window=7)
    assert valid.tolist() == [[False, False, True, False, False, False], [False] * 6]


def test_group_share_is_the_mean_of_shares() -> None:
    masses = torch.tensor([[[[1.0, 2.0, 50.0], [3.0, 0.0, -9.0]]]])
    valid = torch.tensor([[True, True, False]])
    made = group_log_shares(masses, valid).exp()[0, 0]
    expected = masses[0, 0, :, :2].softmax(-1).mean(0)
    torch.testing.assert_close(made[:2], expected)
    assert made[2] == 0


def test_divergence_lumps_what_is_not_at_the_top() -> None:
    true = torch.tensor([[[0.5, 0.2, 0.2, 0.1, 1e-38]]]).log()
    guess = torch.tensor([[[0.1, 0.4, 0.2, 0.3, 1e-38]]]).log()
    valid = torch.tensor([[True] * 4 + [False]])
    expected = 0.5 * torch.tensor(0.5 / 0.1).log() + 0.5 * torch.tensor(0.5 / 0.9).log()
    torch.testing.assert_close(divergence(true, guess, valid, top=0.25), expected)
    assert divergence(true, true, valid, top=0.25).abs() < 1e-6
    all_single = (true.exp() * (true - guess))[..., :4].sum()
    torch.testing.assert_close(divergence(true, guess, valid, top=1.0), all_single)


def test_recall_is_of_the_smallest_set_that_covers_gamma() -> None:
    true = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).log()
    valid = torch.ones(1, 4, dtype=torch.bool)
    guess = torch.tensor([[[0.4, 0.1, 0.2, 0.3]]]).log()
    assert recall(true, guess, valid, gamma=0.79).item() == pytest.approx(0.5)
    assert recall(true, guess, valid, gamma=0.4).item() == 1
    assert recall(true, true, valid, gamma=0.9).item() == 1
    assert recall(true, guess, valid, gamma=1.0).item() == 1
