"""Budgets follow what layers lack: kernel = reference on random histories, and single cases by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from factories import DEVICE
from sparse_kernels import prefetch_budget, prefetch_state, stopwatch_state

IMPLS = ["torch", "triton"]
RATE, BLOCK, PAGE, MIN_CONTEXT = 40_000, 8_192, 32, 100


def scored(length: int) -> int:
    """Tokens of a request that a forecast can rank blocks by."""
    before = max(length - (PAGE if length % PAGE == 0 else 1), 0)
    return 0 if before < MIN_CONTEXT <= length else before


class Layers:
    """Totals of a few layers, as steps add to them."""

    def __init__(
        self, layers: int, impl: str, *, first: int = 0, least: int = 1, most: int = 1000, timed: bool = False
    ):
        self.impl, self.least, self.most = impl, least, most
        self.state = prefetch_state(layers, first, DEVICE)
        self.demand = torch.full((layers, 4), 10**10, dtype=torch.int64, device=DEVICE)
        self.forecasts = torch.full((layers, 2), 10**10, dtype=torch.int64, device=DEVICE)
        self.state[:, :2] = 10**10
        self.clock = stopwatch_state(1, DEVICE) if timed else None
        self.budgets = torch.full((layers,), -7, dtype=torch.int32, device=DEVICE)

    def step(self, misses: list[int], used: list[int], lengths: list[int], nanoseconds: int = 0) -> list[int]:
        """Adds what the last step missed and used, and begins another; returns the budgets."""
        self.demand[:, 1] += torch.tensor(misses, device=DEVICE)
        self.demand[:, 0] += 99
        self.forecasts += torch.tensor([[5, n] for n in used], device=DEVICE)
        if self.clock is not None and nanoseconds:
            self.clock += torch.tensor([77, 1, nanoseconds], device=DEVICE)
        out = torch.full((len(misses) + 1, len(lengths) + 3), -7, dtype=torch.int32, device=DEVICE)
        prefetch_budget(
            torch.tensor([*lengths, 2**30], dtype=torch.int32, device=DEVICE),
            self.demand,
            self.forecasts,
            clock=self.clock,
            state=self.state,
            least=self.least,
            most=self.most,
            bytes_per_microsecond=RATE,
            block_bytes=BLOCK,
            page_size=PAGE,
            min_context=MIN_CONTEXT,
            budgets=self.budgets,
            lengths=out[:-1, : len(lengths)],
            impl=self.impl,
        )
        made = self.budgets.tolist()
        assert out[:-1, : len(lengths)].tolist() == [[scored(n) if budget else 0 for n in lengths] for budget in made]
        assert (out[-1] == -7).all()
        assert (out[:, len(lengths) :] == -7).all()
        return made


@pytest.mark.parametrize("impl", IMPLS)
def test_a_budget_is_half_as_much_again_as_what_was_lacked(impl: str) -> None:
    layers = Layers(3, impl)
    assert layers.step([10, 0, 3], [0, 0, 4], [70, 0, 3]) == [15, 0, 11]
    # A quarter less in each step, or what is lacked now.
    assert layers.step([0, 1, 9], [0, 0, 4], [70, 5]) == [11, 2, 20]
    assert layers.step([0, 0, 0], [0, 0, 0], [70]) == [8, 0, 14]
    assert [layers.step([0] * 3, [0] * 3, [70]) for _ in range(12)][-1] == [0, 0, 0]


@pytest.mark.parametrize("impl", IMPLS)
def test_bounds(impl: str) -> None:
    layers = Layers(2, impl, least=5, most=20)
    assert layers.step([4, 5], [0, 0], [70]) == [0, 8]
    assert layers.step([4, 500], [0, 500], [70]) == [0, 20]


@pytest.mark.parametrize("impl", IMPLS)
def test_the_first_steps_may_fetch_what_is_allowed(impl: str) -> None:
    layers = Layers(1, impl, first=100, most=100)
    assert [layers.step([0], [0], [70])[0] for _ in range(3)] == [100, 84, 63]


@pytest.mark.parametrize("impl", IMPLS)
def test_copies_have_to_fit_beside_a_layer(impl: str) -> None:
    layers = Layers(1, impl, timed=True)
    # Nothing has been timed yet.
    assert layers.step([900], [0], [70]) == [1000]
    assert layers.step([900], [0], [70], nanoseconds=100_000) == [100 * RATE // BLOCK]
    # A quarter of what is new; without a new measurement all stays.
    assert layers.step([900], [0], [70], nanoseconds=200_000) == [125 * RATE // BLOCK]
    assert layers.step([900], [0], [70]) == [125 * RATE // BLOCK]


@pytest.mark.parametrize("impl", IMPLS)
def test_steps_of_padding_teach_nothing(impl: str) -> None:
    layers = Layers(2, impl, first=8, timed=True)
    before = layers.state.clone()
    assert layers.step([50, 0], [0, 3], [0, 0]) == [0, 0]
    assert torch.equal(layers.state, before)
    assert layers.step([0, 0], [0, 0], [0] * 300 + [70]) == [75, 9]


def test_kernel_equals_reference() -> None:
    draw = random.Random(4)
    timed = [Layers(5, impl, first=50, least=3, most=60, timed=True) for impl in IMPLS]
    plain = [Layers(5, impl, first=50, least=3, most=60) for impl in IMPLS]
    for _ in range(60):
        lengths = [
            draw.choice((0, 1, 5, PAGE, PAGE + 1, 99, 100, 101, 128, 160, 100_000))
            for _ in range(draw.choice((1, 4, 300)))
        ]
        added: Any = [[draw.choice((0, 0, 1, 7, 40)) for _ in range(5)] for _ in range(2)]
        elapsed = draw.choice((0, draw.randrange(1000, 20_000)))
        for pair in (timed, plain):
            first, second = (layers.step(*added, lengths, elapsed) for layers in pair)
            assert first == second
            assert torch.equal(pair[0].state, pair[1].state)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_scored_ends_where_keys_do(impl: str) -> None:
    """By hand: short requests, those at the minimum context of 100, and those that fill a page of 32 beyond it."""
    given = {0: 0, 1: 0, 31: 30, 32: 0, 33: 32, 99: 98, 100: 0, 101: 100, 127: 126, 128: 0, 129: 128, 160: 128}
    assert {n: scored(n) for n in given} == given
    assert Layers(1, impl, first=50).step([9], [0], list(given)) == [56]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"most": 0}, "most is 0; needed: at least 1"),
        ({"page_size": 0}, "page_size is 0; needed: at least 1"),
        ({"state": torch.zeros(2, 5, dtype=torch.int64)}, r"state has shape .*; needed: \[2, 6\]"),
        ({"clock": torch.zeros(4, dtype=torch.int64)}, r"clock has shape .*; needed: \[3\]"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "seq_lens": torch.zeros(1, dtype=torch.int32),
        "demand_totals": torch.zeros(2, 4, dtype=torch.int64),
        "forecast_totals": torch.zeros(2, 2, dtype=torch.int64),
        "clock": None,
        "state": prefetch_state(2, 1, "cpu"),
        "least": 1,
        "most": 1,
        "bytes_per_microsecond": 1,
        "block_bytes": 1,
        "page_size": 1,
        "min_context": 0,
        "budgets": torch.zeros(2, dtype=torch.int32),
        "lengths": torch.zeros(2, 1, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        prefetch_budget(**(arguments | change))
