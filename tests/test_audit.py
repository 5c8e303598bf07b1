"""The live audit: what it measures is the true coverage, and it changes nothing."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_decode_step import DEVICE, DTYPE, LAYERS, SCALE, Simulation, lengths

from sglang_sparse import memory
from sglang_sparse.observe.audit import CoverageAudit
from sglang_sparse.observe.coverage_history import WINDOW
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.prefill import summarise_prefill

CHOICES = [
    {"gamma": 0.9},
    {"gamma": 0.8, "group": "every", "estimator": "mean"},
    {"gamma": 0.9, "dense_layers": (1,), "estimator": "exact"},
    {"rule": "top-k", "top_k": 0.3, "estimator": "minmax"},
    {"gamma": 0.7, "thumbnail_bits": 2, "min_context": 150},
    {"gamma_by_head": ((0.9, 0.6), (0.7, 0.8))},
]
TOLERANCE = {"atol": 1e-4 if torch.float32 == DTYPE else 5e-3, "rtol": 0}

Lists = dict[tuple[int, int, int], list[int]]
"""Blocks that were read, by layer, row and KV head."""


def make_options(**changes: Any) -> SparseDecodeOptions:
    return SparseDecodeOptions(**{"min_context": 0, "sink_tokens": 4, "window_tokens": 16, "audit_rate": 1, **changes})


class Chosen(random.Random):
    """Samples every step, and always the same layer and row."""

    def __init__(self, layer: int, row: int) -> None:
        super().__init__()
        self.layer, self.row = layer, row

    def random(self) -> float:
        return 0.0

    def choice(self, seq: Any) -> Any:
        assert self.layer in seq
        return self.layer

    def randrange(self, *args: Any) -> int:
        return self.row


def make_audit(sim: Simulation, generator: random.Random) -> CoverageAudit:
    return CoverageAudit(
        sim.step, key_pool=lambda layer: sim.pools[layer][0], scales=[SCALE] * LAYERS, generator=generator
    )


def attend(sim: Simulation, number: int) -> tuple[torch.Tensor, torch.Tensor, Lists]:
    """One step: queries, outputs and the lists of every layer (with turns, of the last row alone)."""
    q = sim.queries(number)
    out = torch.full_like(q, float("nan"))
    lists: Lists = {}
    for layer in range(LAYERS):
        k_pool, v_pool = sim.pools[layer]
        sim.step.attend(layer, q[layer], k_pool, v_pool, scale=SCALE, out=out[layer])
        for row in range(len(sim.lengths)):
            if layer in sim.step.summaries and row < sim.step.buffers.turn:
                for head in range(sim.geometry.kv_heads):
                    lists[layer, row, head] = sim.listed(layer, row, head)
    return q, out, lists


def true_coverage(sim: Simulation, layer: int, row: int, q: torch.Tensor, lists: Lists) -> list[float]:
    """Share of the attention mass in the listed blocks, token by token in float64: one number a KV head."""
    g, length = sim.geometry, sim.lengths[row]
    slots = sim.req_to_token[row + 1, :length].long()
    by_head = []
    for kv_head in range(g.kv_heads):
        kept = torch.isin(torch.arange(length) // g.block_size, torch.tensor(lists[layer, row, kv_head]))
        k = sim.pools[layer][0][slots, kv_head].double().cpu()
        heads = q[layer, row, kv_head * g.group_size : (kv_head + 1) * g.group_size].double().cpu()
        covered = torch.softmax(heads @ k.T * SCALE, -1)[:, kept].sum(-1)
        by_head.append(covered.mean() if sim.step.options.group == "average" else covered.min())
    return torch.stack(by_head).tolist()


def arrived(audit: CoverageAudit) -> list[tuple[int, list[float]]]:
    """The samples measured so far, once the device is done."""
    audit.finish()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        audit.finish()
    return audit.take_unread()


@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_the_audit_measures_the_true_coverage(changes: dict) -> None:
    options = make_options(**changes)
    sim = Simulation(lengths(), options, DEVICE)
    generator = Chosen(0, 0)
    audit = make_audit(sim, generator)
    expected = []
    for number, (layer, row) in enumerate(itertools.product(sorted({0, 1} - set(options.dense_layers)), (0, 2, 3))):
        generator.layer, generator.row = layer, row
        audit.before_step(4)
        sim.load([0, 1, 2, 3])
        q, _, lists = attend(sim, number)
        if sim.lengths[row] >= options.min_context:
            expected.append((layer, true_coverage(sim, layer, row, q, lists)))
    samples = arrived(audit)
    assert [layer for layer, _ in samples] == [layer for layer, _ in expected]
    for (_, values), (_, wanted) in zip(samples, expected, strict=True):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(wanted), **TOLERANCE)
    missed = max(1 - value for _, values in expected for value in values)
    assert missed > 0.02, "every block was kept: nothing was measured"


@pytest.mark.parametrize(("asked", "warns"), [({}, False), ({"estimator": "minmax"}, True)])
def test_coverage_is_compared_with_what_the_heads_of_a_layer_ask_for(
    asked: dict, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Exact masses reach low gammas that lie far below the default one; bounds taken for masses miss high ones."""
    by_head = ((0.9, 0.8), (0.8, 0.9)) if warns else ((0.4, 0.6), (0.6, 0.4))
    options = make_options(
        **{"estimator": "exact", "sink_tokens": 0, "window_tokens": 1, **asked}, gamma_by_head=by_head
    )
    sim = Simulation([300], options, DEVICE)
    audit = make_audit(sim, random.Random(2))
    coverage = []
    for number in range(WINDOW + 1):
        audit.before_step(1)
        sim.load([0])
        sim.lengths[0] -= 1
        attend(sim, number)
        coverage += [value for _, values in arrived(audit) for value in values]
    mean = sum(coverage) / len(coverage)
    assert mean < 0.83 if warns else 0.5 < mean < 0.9
    assert len(caplog.messages) == warns


def test_an_audited_step_gives_the_same_bits() -> None:
    results = []
    for rate in (0, 1):
        sim = Simulation(lengths(), make_options(gamma=0.8, audit_rate=rate), DEVICE)
        audit = make_audit(sim, random.Random(3)) if rate else None
        outs = []
        for number in range(6):
            if audit is not None:
                audit.before_step(4)
            sim.load([row for row in range(4) if (number + row) % 5])
            outs.append(attend(sim, number)[1])
        results.append((torch.stack(outs), sim.step.counters.kept_blocks))
        if audit is not None:
            assert len(arrived(audit)) > 0
    assert torch.equal(results[0][0].view(torch.uint8), results[1][0].view(torch.uint8))
    assert torch.equal(results[0][1], results[1][1])


def test_turns_are_audited_like_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in (memory.MAX_STEP_BYTES, 1):
        monkeypatch.setattr(memory, "MAX_STEP_BYTES", limit)
        sim = Simulation(lengths(), make_options(gamma=0.8), DEVICE)
        assert (sim.step.buffers.turn == 1) == (limit == 1)
        audit = make_audit(sim, random.Random(5))
        for number in range(8):
            audit.before_step(4)
            sim.load([0, 1, 2, 3])
            attend(sim, number)
        found.append(arrived(audit))
    assert len(found[0]) == 8
    assert found[0] == found[1]


def test_pages_that_a_prefill_takes_over_are_measured_before() -> None:
    """The request ended, and the next prefill writes its own keys into the request's pages."""

    class Prefill:
        def __init__(self) -> None:
            self.token_to_kv_pool = SimpleNamespace(get_kv_buffer=lambda layer: sim.pools[layer])

        def init_forward_metadata(self, forward_batch: object) -> None:
            pass

        def forward_extend(self, q, k, v, layer, forward_batch):
            return q

    sim = Simulation(lengths(), make_options(gamma=0.7), DEVICE)
    audit = make_audit(sim, Chosen(0, 3))
    backend: Any = Prefill()
    summarise_prefill(backend, sim.step.summaries, sim.geometry.page_size, before_chunk=audit.finish)
    audit.before_step(4)
    sim.load([0, 1, 2, 3])
    q, _, lists = attend(sim, 0)
    expected = true_coverage(sim, 0, 3, q, lists)

    backend.init_forward_metadata(
        SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: False), extend_seq_lens_cpu=None)
    )
    sim.pools[0][0].copy_(sim.pools[0][0].flip(0))
    spoilt = true_coverage(sim, 0, 3, q, lists)
    assert max(abs(a - b) for a, b in zip(expected, spoilt, strict=True)) > 0.05, "the pages were not taken over"
    ((layer, values),) = arrived(audit)
    assert layer == 0
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), **TOLERANCE)


@pytest.mark.parametrize("changes", [{"audit_rate": 0}, {"rule": "all"}, {"dense_layers": (0, 1)}], ids=str)
def test_without_a_rate_or_sparse_layers_there_is_no_tap(changes: dict) -> None:
    assert Simulation(lengths(), make_options(**changes), DEVICE).step.tap is None


def test_short_and_padded_requests_are_dropped() -> None:
    sim = Simulation(lengths(), make_options(min_context=250), DEVICE)
    for row, found in ((0, 0), (2, 0), (3, 1), (1, 0)):
        audit = make_audit(sim, Chosen(1, row))
        audit.before_step(4)
        sim.load([0, 2, 3])
        attend(sim, 0)
        assert len(arrived(audit)) == found
        assert audit.report()["samples"] == found


def test_the_rate_is_the_share_of_steps_and_other_steps_are_not_tapped() -> None:
    sim = Simulation(lengths(), make_options(audit_rate=0.3), DEVICE)
    audit = make_audit(sim, random.Random(1))
    assert sim.step.tap is not None
    armed = 0
    for number in range(100):
        audit.before_step(4)
        layer, row = sim.step.tap.target.tolist()
        assert (layer in (0, 1) and 0 <= row < 4) or (layer, row) == (-1, -1)
        armed += layer >= 0
        if number < 10:
            sim.load([0, 1, 2, 3])
            attend(sim, number)
    assert 15 < armed < 45
    audit.before_step(0)
    assert sim.step.tap.target.tolist() == [-1, -1]
    assert audit.report()["rate"] == 0.3


def test_audits_of_one_seed_sample_the_same_steps() -> None:
    """As those of tensor-parallel ranks, none of which then waits for the audits of the others."""
    sampled = []
    for seed in (5, 5, 6):
        sim = Simulation(lengths(), make_options(audit_rate=0.5), DEVICE)
        audit = make_audit(sim, random.Random(seed))
        sampled.append([])
        for _ in range(20):
            audit.before_step(4)
            sampled[-1].append(sim.step.tap.target.tolist())
    assert sampled[0] == sampled[1] != sampled[2]
    assert [-1, -1] in sampled[0]


def test_a_step_that_never_ran_is_dropped() -> None:
    sim = Simulation(lengths(), make_options(), DEVICE)
    audit = make_audit(sim, Chosen(0, 3))
    audit.before_step(4)
    sim.load([0, 1, 2, 3])
    attend(sim, 0)
    audit.before_step(4)
    assert len(arrived(audit)) == 1, "the second step's tap was empty"


def test_samples_on_their_way_are_waited_for_only_when_asked() -> None:
    """As on a GPU, where the last step's sample is still being measured when the server falls idle."""

    class Late:
        done = False

        def query(self) -> bool:
            return self.done

        def synchronize(self) -> None:
            self.done = True

    audit = make_audit(Simulation(lengths(), make_options(), DEVICE), Chosen(0, 3))
    audit._arriving.extend((layer, torch.tensor([0.5, 0.75]), Late()) for layer in (0, 1))
    audit.before_step(0)
    assert audit.report()["samples"] == 0
    audit.settle()
    assert audit.take_unread() == [(0, [0.5, 0.75]), (1, [0.5, 0.75])]


@pytest.mark.gpu
@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_replays_of_a_captured_step_are_audited_without_waiting(changes: dict) -> None:
    options = make_options(**changes)
    sim, eager = Simulation(lengths(), options, "cuda"), Simulation(lengths(), options, "cuda")
    audit = make_audit(sim, random.Random(11))
    target = sim.step.tap.target
    q = torch.zeros_like(sim.queries(0))
    out = torch.zeros_like(q)
    sim.load([])
    sim.attend(q, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sim.attend(q, out)
    expected = []
    for number in range(30):
        torch.cuda.set_sync_debug_mode("error")
        try:
            audit.before_step(4)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for simulation in (sim, eager):
            simulation.load([0, 1, 2, 3])
        q.copy_(sim.queries(number))
        graph.replay()
        _, eager_out, lists = attend(eager, number)
        assert torch.equal(out, eager_out)
        layer, row = target.tolist()
        if sim.lengths[row] >= options.min_context:
            expected.append((layer, true_coverage(eager, layer, row, q, lists)))
    samples = arrived(audit)
    assert [layer for layer, _ in samples] == [layer for layer, _ in expected]
    for (_, values), (_, wanted) in zip(samples, expected, strict=True):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(wanted), **TOLERANCE)
