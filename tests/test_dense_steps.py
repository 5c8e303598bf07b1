"""Steps in which no request selects: the same answers and counts as steps that look for something to leave out."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_decode_step import DEVICE, DTYPE, FUSED, OPTIONS, Simulation, lengths
from test_graph_batches import BATCHES, attend, capture, load

from sglang_sparse import dense_graphs, hook_targets
from sglang_sparse.control.request import KEEP_ALL
from sglang_sparse.control.state import DecodeControl
from sglang_sparse.options import SparseDecodeOptions

SHORT = 2**20
"""A minimum context that no request of these tests reaches."""
SELECTING = [changes for changes in (*OPTIONS, *FUSED) if changes.get("rule") != "all"]
ROWS = [0, 1, 2, 3]
# The fused pass adds the same blocks up in another order than attention over all of them.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5} if torch.float32 == DTYPE else {"atol": 5e-3, "rtol": 1.6e-2}


def simulation(changes: dict[str, Any], device: str = DEVICE, **more: Any) -> Simulation:
    options = SparseDecodeOptions(**{"min_context": 0, "sink_tokens": 4, "window_tokens": 16, **changes, **more})
    return Simulation(lengths(), options, device)


def run(sim: Simulation, number: int, dense: bool) -> torch.Tensor:
    """One token of each request; returns the outputs `[layers, B, Hq, D]`."""
    sim.load(ROWS)
    q = sim.queries(number)
    out = torch.full_like(q, float("nan"))
    sim.step.dense = dense
    sim.step.counters.count_step(sim.step.buffers.seq_lens[: len(ROWS)], dense=dense)
    for layer, (k_pool, v_pool) in enumerate(sim.pools):
        sim.step.attend(layer, q[layer], k_pool, v_pool, scale=0.125, out=out[layer])
    return out


@pytest.mark.parametrize("changes", SELECTING, ids=str)
def test_a_dense_step_is_one_that_found_nothing_to_do(changes: dict[str, Any]) -> None:
    dense, idle = simulation(changes, min_context=SHORT), simulation(changes, min_context=SHORT)
    for number in range(5):
        torch.testing.assert_close(run(dense, number, True), run(idle, number, False), **TOLERANCE)
        assert torch.equal(dense.step.buffers.request_totals, idle.step.buffers.request_totals)
    assert dense.step.counters.read() == idle.step.counters.read()
    assert dense.step.counters.read_recent() == idle.step.counters.read_recent()


@pytest.mark.parametrize("changes", SELECTING, ids=str)
def test_steps_after_dense_ones_choose_what_they_would_have(changes: dict[str, Any]) -> None:
    mixed, plain = simulation(changes), simulation(changes)
    kept = []
    # Pages close in dense steps too: at least one, with 32 tokens a page.
    for number in range(80):
        is_dense = number % 40 < 36
        first, second = run(mixed, number, is_dense), run(plain, number, False)
        if not is_dense:
            assert torch.equal(first, second)
            assert torch.equal(mixed.step.buffers.request_totals, plain.step.buffers.request_totals)
        kept.append(mixed.step.buffers.request_totals[: len(ROWS)].double().sum(0))
        if is_dense:
            assert kept[-1][0] == kept[-1][1]
    reading = mixed.step.counters.read()
    total = torch.stack(kept).sum(0)
    assert reading.kept_fraction == pytest.approx(float(total[0] / total[1]), abs=1e-12)
    assert reading.kept_fraction < 1
    assert (reading.steps, reading.scanned_steps) == (80, 8)


def test_scanned_bytes_are_those_of_other_steps_alone() -> None:
    sim, plain = simulation({"gamma": 0.9}), simulation({"gamma": 0.9})
    for number in range(3):
        run(sim, number, dense=number != 1)
        run(plain, number, dense=False)
    first, second = sim.step.counters.read(), plain.step.counters.read()
    assert 0 < sum(first.scan_bytes_by_layer) < 0.4 * sum(second.scan_bytes_by_layer)


def test_dense_lasts_as_long_as_the_capture_even_if_it_fails() -> None:
    sim = simulation({"gamma": 0.9})

    def fail() -> None:
        with sim.step.of_kind(dense=True):
            assert sim.step.dense
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    assert not sim.step.dense


def control(**changes: Any) -> DecodeControl:
    options = SparseDecodeOptions(**{"min_context": 100, **changes})
    return DecodeControl(options, torch.full((1, 4, 2), 0.9))


@pytest.mark.parametrize(
    ("requests", "longest", "may_select"),
    [
        ([None], 99, False),
        ([None], 100, True),
        ([None], None, True),
        ([0.5], 99, False),
        ([KEEP_ALL, KEEP_ALL], 500, False),
        ([KEEP_ALL, None], 500, True),
        ([None, KEEP_ALL], 500, True),
        ([KEEP_ALL, 0.5], 500, True),
        ([KEEP_ALL], None, False),
        ([], None, True),
    ],
)
def test_who_may_select(requests: list[float | None], longest: int | None, may_select: bool) -> None:
    made = control()
    made.announce(requests, longest)
    made.before_step()
    assert made.may_select is may_select
    # What one step was told does not reach the next.
    made.announce([None])
    made.before_step()
    assert made.may_select


def test_a_server_that_is_switched_off_selects_nothing_from_the_next_step_on() -> None:
    made = control()
    made.announce([None, 0.5], 500)
    made.change({"enabled": False})
    made.before_step()
    assert not made.may_select
    made.change({"enabled": True})
    made.before_step()
    assert made.may_select


class Step:
    def __init__(self) -> None:
        self.dense = False


class Backend:
    def __init__(self, step: Any, has_dense_steps: bool = True) -> None:
        self.step, self.has_dense_steps = step, has_dense_steps


@pytest.mark.parametrize("label", [None, "lora"])
@pytest.mark.parametrize("has_dense_steps", [True, False])
@pytest.mark.parametrize("last", [False, True])
def test_each_size_is_captured_for_either_kind_of_step(label: str | None, has_dense_steps: bool, last: bool) -> None:
    """After a step of either kind: weights that are replaced at run time may have all graphs captured anew."""
    sim = simulation({"gamma": 0.9})
    sim.step.dense = last
    hooks = dense_graphs.dense_graph_hooks(lambda: Backend(sim.step, has_dense_steps))  # type: ignore[arg-type]
    captured: dict[tuple[int, str | None], bool] = {}

    def capture_one_shape(runner: Any, size: int, forward: Any, stream: Any, variant: str | None, more: str) -> None:
        assert (runner, forward, more) == ("runner", "forward", "more")
        captured[size, variant] = sim.step.dense

    for size in (4, 1):
        hooks[hook_targets.CAPTURE_GRAPH](capture_one_shape, "runner", size, "forward", None, label, "more")
    dense = dense_graphs.dense_label(label)
    expected = {(size, label): False for size in (4, 1)}
    assert captured == expected | ({(size, dense): True for size in (4, 1)} if has_dense_steps else {})
    for is_dense in (False, True):
        sim.step.dense = is_dense
        chosen = hooks[hook_targets.GRAPH_VARIANT](lambda runner, batch: label, "runner", "batch")
        assert chosen == (dense if is_dense else label)


def test_nothing_changes_without_sparse_decode() -> None:
    hooks = dense_graphs.dense_graph_hooks(lambda: None)
    calls = []
    hooks[hook_targets.CAPTURE_GRAPH](lambda *given: calls.append(given), "runner", 4, "forward")
    assert calls == [("runner", 4, "forward", None, None)]
    assert hooks[hook_targets.GRAPH_VARIANT](lambda *_: None, "runner", "batch") is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes", [{"gamma": 0.9}, {"rule": "top-k", "top_k": 0.3, "estimator": "minmax"}, *FUSED], ids=str
)
def test_graphs_of_both_kinds_in_any_order_equal_eager_steps(changes: dict[str, Any]) -> None:
    sim, eager = simulation(changes, "cuda"), simulation(changes, "cuda")
    q = torch.zeros_like(sim.queries(0))
    out = torch.zeros_like(q)
    replays = {}
    for batch in BATCHES:
        for dense in (False, True):
            load(sim, [], batch)
            sim.step.dense = dense
            replays[batch, dense] = capture(lambda: attend(sim, q, out, batch))  # noqa: B023
    generator = random.Random(5)
    for number in range(60):
        batch, dense = generator.choice(BATCHES), generator.random() < 0.5
        requests = generator.sample(range(4), generator.randint(1, batch))
        q.copy_(sim.queries(number))
        expected = torch.full_like(q, float("nan"))
        load(eager, requests, batch)
        eager.step.dense = dense
        attend(eager, q, expected, batch)
        out.fill_(float("nan"))
        load(sim, requests, batch)
        replays[batch, dense]()
        assert torch.equal(out[:, :batch], expected[:, :batch])
        assert not out[:, :batch].isnan().any()
        assert torch.equal(sim.step.buffers.request_totals, eager.step.buffers.request_totals)
    assert torch.equal(sim.step.counters._counts, eager.step.counters._counts)
