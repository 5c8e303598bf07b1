"""Counters: what shares mean, and that padded rows do not count."""

from __future__ import annotations

import pytest
import torch

from sglang_sparse.geometry import Geometry
from sglang_sparse.observe.counters import DecodeCounters
from sglang_sparse.observe.report import decode_line

GEOMETRY = Geometry(kv_heads=2, group_size=3, head_dim=64, dtype=torch.bfloat16, page_size=32, block_size=16)


def counters(min_context: int = 100) -> DecodeCounters:
    return DecodeCounters(
        GEOMETRY,
        layers=3,
        sparse_layers=[0, 2],
        scan_bytes=GEOMETRY.kv_bytes / 8,
        min_context=min_context,
        device="cpu",
    )


def test_nothing_was_read_before_the_first_step() -> None:
    reading = counters().read()
    assert (reading.steps, reading.kept_fraction, reading.bytes_read_fraction) == (0, None, None)
    assert decode_line(reading) is None


def test_shares_are_of_all_layers_and_heads() -> None:
    made = counters()
    # 200 tokens: 13 blocks, 6 closed pages of 192 tokens, scanned; 64 tokens: 4 blocks, below the minimum context.
    made.count_step(torch.tensor([200, 0, 64], dtype=torch.int32))
    made.kept_blocks[0] = torch.tensor([7, 9])
    made.kept_blocks[2] = torch.tensor([17, 10])
    reading = made.read()
    assert reading.steps == 1
    assert reading.kept_by_layer_and_head == [[7 / 17, 9 / 17], [1, 1], [1, 10 / 17]]
    kept = (7 + 9 + 17 + 17 + 17 + 10) / (6 * 17)
    assert reading.kept_fraction == pytest.approx(kept)
    scanned = 4 * (192 * GEOMETRY.kv_bytes / 8 + 8 * GEOMETRY.kv_bytes / 2)
    assert reading.bytes_read_fraction == pytest.approx(kept + scanned / (6 * 264 * GEOMETRY.kv_bytes))


def test_a_step_of_padded_rows_does_not_count() -> None:
    made = counters()
    made.count_step(torch.zeros(4, dtype=torch.int32))
    assert made.read().steps == 0


def test_the_log_line_covers_the_steps_since_the_one_before() -> None:
    made = counters(min_context=10_000)
    step = torch.tensor([160], dtype=torch.int32)
    seen = []
    for _ in range(3):
        made.count_step(step)
        made.kept_blocks += torch.tensor([[5], [0], [5]])
        seen.append(made.read_recent())
    made.count_step(step)
    seen.append(made.read_recent())
    assert [reading.steps for reading in seen] == [0, 1, 1, 1]
    assert seen[1].kept_fraction == pytest.approx((5 + 10 + 5) / 30)
    assert decode_line(seen[1]) == "Sparse decode, #steps: 1, kept: 0.667, bytes read: 0.667"
