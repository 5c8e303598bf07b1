"""Thresholds that change between steps: by request, by server, switched off, and inside a captured graph."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from test_decode_step import DEVICE, DTYPE, LAYERS, Simulation, lengths

from sglang_sparse.control.request import KEEP_ALL
from sglang_sparse.control.state import DecodeControl
from sglang_sparse.options import SparseDecodeOptions

RULES = [
    {"gamma": 0.6},
    {"gamma": 0.6, "group": "every", "estimator": "mean"},
    {"gamma": 0.6, "dense_layers": (1,)},
    {"gamma_by_head": ((0.9, 0.4), (0.5, 0.7))},
    {"rule": "top-k", "top_k": 0.3, "estimator": "minmax"},
    {"rule": "top-k", "top_k": 9, "estimator": "exact"},
    {"rule": "top-delta", "delta": 0.1, "path": "lists"},
    {"rule": "top-delta", "delta": 0.1, "path": "fused"},
]
ROWS = [0, 1, 2, 3]
# The fused pass and lists add the same blocks up in another order.
TOLERANCE = {} if torch.float32 == DTYPE else {"atol": 5e-3, "rtol": 1.6e-2}


def make_options(**changes: Any) -> SparseDecodeOptions:
    return SparseDecodeOptions(**{"min_context": 0, "sink_tokens": 4, "window_tokens": 16, **changes})


def step(sim: Simulation, number: int = 0) -> torch.Tensor:
    """One token of each request; returns the outputs `[layers, B, Hq, D]`."""
    sim.step.control.before_step()
    sim.load(ROWS)
    q = sim.queries(number)
    out = torch.full_like(q, float("nan"))
    sim.attend(q, out)
    return out


def kept(sim: Simulation) -> list[float]:
    """Share of blocks that each request read in the last step."""
    totals = sim.step.buffers.request_totals[: len(ROWS)].double()
    return (totals[:, 0] / totals[:, 1]).tolist()


@pytest.mark.parametrize("changes", RULES, ids=str)
def test_switched_off_every_request_reads_everything_from_the_next_step(changes: dict) -> None:
    sim = Simulation(lengths(), make_options(**changes), DEVICE)
    dense = Simulation(lengths(), make_options(rule="all"), DEVICE)
    step(sim), step(dense)
    assert min(kept(sim)) < 1
    sim.step.control.change({"enabled": False})
    # A request's own gamma does not outlast the switch either.
    sim.step.control.announce([0.1, None, 0.1, None])
    torch.testing.assert_close(step(sim, 1), step(dense, 1), **TOLERANCE)
    assert kept(sim) == [1, 1, 1, 1]
    sim.step.control.change({"enabled": True})
    sim.step.control.announce([])
    step(sim, 2)
    assert min(kept(sim)) < 1


@pytest.mark.parametrize("changes", RULES, ids=str)
def test_back_on_a_step_is_what_it_would_have_been(changes: dict) -> None:
    sim = Simulation(lengths(), make_options(**changes), DEVICE)
    untouched = Simulation(lengths(), make_options(**changes), DEVICE)
    sim.step.control.change({"enabled": False})
    step(sim), step(untouched)
    sim.step.control.change({"enabled": True})
    assert torch.equal(step(sim, 1), step(untouched, 1))


def test_a_change_waits_for_the_next_step() -> None:
    sim = Simulation(lengths(), make_options(gamma=0.6), DEVICE)
    control = sim.step.control
    before = sim.step.buffers.thresholds.clone()
    control.change({"gamma": 0.3, "audit_rate": 0.5})
    assert control.is_waiting
    assert control.report() == {"enabled": True, "gamma": 0.3, "delta": None, "audit_rate": 0.5}
    assert torch.equal(sim.step.buffers.thresholds, before)
    step(sim)
    assert not control.is_waiting
    assert sim.step.buffers.thresholds.unique().tolist() == [pytest.approx(0.3)]
    assert control.gamma_of(0) == 0.3
    assert control.audit_rate == 0.5


def test_gamma_changes_what_is_read_and_null_restores_it() -> None:
    options = make_options(gamma_by_layer=(0.5, 0.9))
    sim = Simulation(lengths(), options, DEVICE)
    expected = {gamma: Simulation(lengths(), make_options(gamma=gamma), DEVICE) for gamma in (0.3, 0.98)}
    started = sim.step.buffers.thresholds.clone()
    for gamma, other in expected.items():
        sim.step.control.change({"gamma": gamma})
        sim.lengths = lengths()
        assert torch.equal(step(sim), step(other))
    assert kept(expected[0.3]) < kept(expected[0.98])
    sim.step.control.change({"gamma": None})
    sim.step.control.before_step()
    assert torch.equal(sim.step.buffers.thresholds, started)


def test_delta_changes_what_is_read_and_null_restores_it() -> None:
    sim = Simulation(lengths(), make_options(rule="top-delta", delta=0.1), DEVICE)
    other = Simulation(lengths(), make_options(rule="top-delta", delta=0.7), DEVICE)
    started = sim.step.buffers.thresholds.clone()
    sim.step.control.change({"delta": 0.7})
    assert torch.equal(step(sim), step(other))
    sim.step.control.change({"delta": None})
    sim.step.control.before_step()
    assert torch.equal(sim.step.buffers.thresholds, started)


@pytest.mark.parametrize("changes", [*RULES[:4], {"gamma": 0.6, "tail": "drop"}], ids=str)
def test_each_request_of_a_batch_reads_what_it_asks_for(changes: dict) -> None:
    """Rows of a mixed batch equal those of servers that ask the same of every request."""
    own = [None, 0.95, KEEP_ALL, 0.3]
    mixed = Simulation(lengths(), make_options(**changes), DEVICE)
    mixed.step.control.announce(own)
    out = step(mixed)
    for row, threshold in enumerate(own):
        alone = Simulation(lengths(), make_options(**changes), DEVICE)
        alone.step.control.announce([threshold] * 4)
        assert torch.equal(out[:, row], step(alone)[:, row])
        assert kept(mixed)[row] == kept(alone)[row]
    dense = Simulation(lengths(), make_options(rule="all"), DEVICE)
    torch.testing.assert_close(out[:, 2], step(dense)[:, 2])
    assert kept(mixed)[2] == 1


def test_the_buffer_follows_batches_that_grow_shrink_and_change() -> None:
    """Whatever batches came before, the rows of a batch hold what it asks for, and all others what the server does."""
    thresholds = torch.full((3, 9, 2), 0.5, device=DEVICE)
    thresholds[1] = 0.25
    control = DecodeControl(SparseDecodeOptions(gamma=0.5), thresholds)
    base = thresholds.clone()
    generator = random.Random(5)
    for _ in range(200):
        if generator.random() < 0.15:
            gamma = generator.choice([None, 0.75])
            control.change({"gamma": gamma, "enabled": generator.random() < 0.7})
        own = [generator.choice([None, None, 0.125, KEEP_ALL]) for _ in range(generator.randrange(10))]
        control.announce(own)
        control.before_step()
        expected = base.clone() if control.gamma is None else torch.full_like(base, control.gamma)
        for row, threshold in enumerate(own):
            if threshold is not None:
                expected[:, row] = threshold
        if not control.enabled:
            expected = torch.full_like(base, math.inf)
        assert torch.equal(thresholds, expected)


def test_steps_like_the_last_one_touch_nothing_on_the_device() -> None:
    class Watched(DecodeControl):
        writes = 0

        def _write_rows(self, *args: Any) -> None:
            self.writes += 1
            super()._write_rows(*args)

    control = Watched(SparseDecodeOptions(), torch.full((1, 4, 1), 0.5))
    for own, writes in [([None] * 4, 0), ([None], 0), ([0.9], 1), ([0.9, None], 1), ([None, 0.9], 2), ([], 3), ([], 3)]:
        control.announce(own)
        control.before_step()
        assert control.writes == writes


def test_a_change_starts_the_count_of_what_was_read_since() -> None:
    sim = Simulation(lengths(), make_options(gamma=0.6), DEVICE)
    step(sim)
    assert sim.step.counters.read_since_mark() == sim.step.counters.read()
    sim.step.control.change({"enabled": False})
    step(sim, 1)
    step(sim, 2)
    since = sim.step.counters.read_since_mark()
    assert (since.steps, since.kept_fraction) == (2, 1)
    total = sim.step.counters.read()
    assert total.steps == 3
    assert total.kept_fraction < 1


def test_the_audit_samples_only_what_the_server_asks_for() -> None:
    control = DecodeControl(SparseDecodeOptions(), torch.full((1, 4, 1), 0.5))
    assert list(control.audited_rows(3)) == [0, 1, 2]
    control.announce([0.9, None, KEEP_ALL, None])
    assert list(control.audited_rows(4)) == [1, 3]
    control.change({"enabled": False})
    control.before_step()
    assert list(control.audited_rows(4)) == []


@pytest.mark.parametrize("changes", [{"gamma": 0.6}, {"gamma": 0.6, "dense_layers": (0,)}, {"rule": "all"}], ids=str)
def test_request_totals_are_the_lists_of_all_layers(changes: dict) -> None:
    sim = Simulation(lengths(), make_options(**changes), DEVICE)
    step(sim)
    for row in ROWS:
        listed = sum(len(sim.listed(layer, row, head)) for layer in range(LAYERS) for head in range(2))
        blocks = LAYERS * 2 * -(-sim.lengths[row] // sim.geometry.block_size)
        assert sim.step.buffers.request_totals[row].tolist() == [listed, blocks]


@pytest.mark.gpu
@pytest.mark.parametrize("changes", RULES, ids=str)
def test_a_captured_step_follows_without_being_captured_again(changes: dict) -> None:
    options = make_options(**changes)
    sim, eager = Simulation(lengths(), options, "cuda"), Simulation(lengths(), options, "cuda")
    q = torch.zeros_like(sim.queries(0))
    out = torch.zeros_like(q)
    sim.load([])
    sim.attend(q, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sim.attend(q, out)
    generator = random.Random(2)
    for number in range(30):
        own = [generator.choice([None, 0.9, 0.3, KEEP_ALL]) for _ in ROWS]
        for simulation in (sim, eager):
            simulation.step.control.announce(own)
            if number % 7 == 3:
                simulation.step.control.change({"enabled": number % 2 == 0})
            simulation.step.control.before_step()
            simulation.load(ROWS)
        q.copy_(sim.queries(number))
        graph.replay()
        expected = torch.full_like(q, float("nan"))
        eager.attend(q, expected)
        assert torch.equal(out, expected)
        assert torch.equal(sim.step.buffers.request_totals, eager.step.buffers.request_totals)
