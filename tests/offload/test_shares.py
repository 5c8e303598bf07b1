"""Shares of slots by layer that a server would do better with, and when it says so."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_sparse.offload.shares import STEPS, ShareAdvice, better_shares


def test_layers_get_slots_as_they_read_blocks() -> None:
    totals = [[800, 200, 0, 0], [90, 10, 0, 0], [700, 200, 0, 0]]
    assert better_shares(totals, [100, 100, 100]) == [1.5, 0.15, 1.35]
    assert better_shares(totals, [150, 15, 135]) is None, "they have them so"
    assert better_shares([[500, 500, 9, 9], [450, 550, 9, 9]], [10, 10]) is None, "what is even stays as it is"
    assert better_shares([[999, 1, 0, 0], [99, 1, 0, 0]], [10, 10]) is None, "next to nothing is missed"
    assert better_shares([[0, 900, 900, 0], [0, 9, 9, 0]], [0, 0]) is None, "there are none to share out"
    assert better_shares([[0, 0, 0, 0]] * 2, [10, 10]) is None


def test_a_server_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    totals = torch.zeros((2, 4), dtype=torch.int64)
    advice = ShareAdvice(totals, [50, 50])
    with caplog.at_level("INFO"):
        for _ in range(5):
            totals += torch.tensor([[900, 300, 0, 0], [100, 20, 0, 0]])
            advice.after(STEPS // 4)
    (line,) = caplog.messages
    assert "24.2% of the blocks" in line
    assert json.loads(line[line.index("{") :]) == {"slot_shares": [1.82, 0.18]}
