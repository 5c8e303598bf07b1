"""A forecast that chooses what attention reads: it decides, true queries attend, and new tokens are always read."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_decode_step import DEVICE, DTYPE, LAYERS, SCALE, Simulation

from sglang_sparse import memory
from sglang_sparse.forecast.chooser import ForecastChooser
from sglang_sparse.forecast.projections import OneVector
from sglang_sparse.options import SparseDecodeOptions

HIDDEN = 24
TOP_K, SINK, WINDOW = 5, 16, 20
OPTIONS = SparseDecodeOptions(
    estimator="strided-mean",
    rule="top-k",
    top_k=TOP_K,
    select_by="forecast",
    min_context=0,
    sink_tokens=SINK,
    window_tokens=WINDOW,
    audit_rate=0.5,
)


class Linear:
    """A forecast of every layer but the first: a random projection, turned a little by the position."""

    name, bytes = "linear", 0

    def __init__(self, kv_heads: int, per_head: int, head_dim: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.shape, self.per_head = (kv_heads, per_head, head_dim), per_head
        self.weight = torch.randn(HIDDEN, math.prod(self.shape), generator=generator).to(DEVICE)

    def __contains__(self, layer: int) -> bool:
        return 0 < layer < LAYERS

    def vectors(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        made = (x.float() @ self.weight).unflatten(1, self.shape)
        return made * torch.cos(positions.float() / 40)[:, None, None, None]


class Chosen(Simulation):
    """A simulation whose layers are chosen by a forecast of inputs that are known beforehand."""

    def __init__(self, per_head: int, one_vector: bool, options: SparseDecodeOptions = OPTIONS) -> None:
        super().__init__([1, 31, 250, 330], options, DEVICE)
        g = self.geometry
        self.forecast = Linear(g.kv_heads, per_head, g.head_dim)
        self.one_vector = one_vector
        self.step.chooser = ForecastChooser(
            OneVector(self.forecast) if one_vector else self.forecast,
            g,
            max_requests=len(self.lengths) + 1,
            hidden=HIDDEN,
            dtype=DTYPE,
            device=DEVICE,
        )
        self.x = torch.zeros(LAYERS, len(self.lengths), HIDDEN, dtype=DTYPE, device=DEVICE)

    def load(self, rows: list[int]) -> None:
        super().load(rows)
        assert self.step.chooser is not None
        self.step.chooser.begin(len(self.lengths))

    def inputs(self, number: int) -> None:
        generator = torch.Generator().manual_seed(500 + number)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))

    def attend(self, q: torch.Tensor, out: torch.Tensor) -> None:
        assert self.step.chooser is not None
        self.lists: list[list[list[list[int]]]] = []
        for layer in range(LAYERS):
            self.step.chooser.note(layer, self.x[layer])
            k_pool, v_pool = self.pools[layer]
            self.step.attend(layer, q[layer], k_pool, v_pool, scale=SCALE, out=out[layer])
            if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
                heads = range(self.geometry.kv_heads)
                rows = range(len(self.lengths)) if self.step.buffers.turn > 1 else ()
                self.lists.append([[self.listed(layer, row, head) for head in heads] for row in rows])

    def expected_list(self, layer: int, row: int, head: int, q: torch.Tensor) -> list[int]:
        """By the definitions, from the keys of the request's closed pages."""
        g, length = self.geometry, self.lengths[row]
        blocks, closed = -(-length // g.block_size), length // g.page_size * g.page_size
        if layer == 0:
            vectors = q[0, row].view(g.kv_heads, g.group_size, -1)[head].float().mean(0, keepdim=True)
        else:
            position = torch.tensor([length - 1], device=DEVICE)
            vectors = self.forecast.vectors(layer, self.x[layer - 1, row : row + 1], position)[0, head]
            vectors = vectors.mean(0, keepdim=True) if self.one_vector else vectors
        keys = self.pools[layer][0][self.req_to_token[row + 1, :closed].long(), head].float()
        scores = torch.full((len(vectors), blocks), float("-inf"))
        for start in range(0, closed - 31, 16):
            value = (keys[start : start + 32].mean(0) @ vectors.to(DTYPE).float().T).cpu() * SCALE
            for block in (start // 16, start // 16 + 1):
                scores[:, block] = torch.maximum(scores[:, block], value)
        forced = {j for j in range(blocks) if 16 * j < SINK or 16 * (j + 1) > min(length - WINDOW, closed)}
        shares = scores.double().softmax(-1).mean(0)
        for block in shares.argsort(descending=True, stable=True).tolist():
            if len(forced) >= min(TOP_K, blocks):
                break
            forced.add(block)
        return sorted(forced)


@pytest.mark.parametrize(("per_head", "one_vector"), [(3, True), (1, False), (3, False)])
def test_the_forecast_chooses_and_true_queries_attend(per_head: int, one_vector: bool) -> None:
    """From one token on, over the borders of pages, with rows of padding: lists and results of each step."""
    sim = Chosen(per_head, one_vector)
    chosen_by_itself = 0
    for number in range(30):
        rows = [row for row in range(4) if (number + row) % 5]
        sim.load(rows)
        sim.inputs(number)
        q = sim.queries(number)
        out = torch.full_like(q, float("nan"))
        sim.attend(q, out)
        for row in range(4):
            if row not in rows:
                assert (out[:, row] == 0).all()
                continue
            newest = (sim.lengths[row] - 1) // 16
            assert all(newest in listed for layer in sim.lists for listed in layer[row])
            if DEVICE == "cpu":
                for layer in range(LAYERS):
                    for head, listed in enumerate(sim.lists[layer][row]):
                        assert listed == sim.expected_list(layer, row, head, q)
            chosen_by_itself += sim.lists[1][row] != sim.lists[0][row]
            found = out[LAYERS - 1, row].double().cpu()
            torch.testing.assert_close(found, sim.expected(LAYERS - 1, row, q), atol=2e-2, rtol=1e-2)
    assert chosen_by_itself > 20
    assert sim.lengths[3] > 352, "a page was filled"


def test_requests_in_turns_get_their_own_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    outs = []
    for limit in (memory.MAX_STEP_BYTES, 1):
        monkeypatch.setattr(memory, "MAX_STEP_BYTES", limit)
        sim = Chosen(3, True)
        assert sim.step.buffers.turn == (5 if limit > 1 else 1)
        sim.load([0, 1, 2, 3])
        sim.inputs(0)
        out = torch.empty_like(sim.queries(0))
        sim.attend(sim.queries(0), out)
        outs.append(out)
    torch.testing.assert_close(outs[0], outs[1])


@pytest.mark.parametrize("tell", ["nothing", "of prefill", "of another batch", "only the last step"])
def test_a_layer_whose_forecast_has_no_input_stops(tell: str) -> None:
    sim = Chosen(1, False)
    sim.load([0, 1, 2, 3])
    chooser = sim.step.chooser
    assert chooser is not None
    if tell == "of prefill":
        chooser.begin(0)
        chooser.note(0, sim.x[0])
    elif tell == "of another batch":
        chooser.note(0, sim.x[0, :3])
    elif tell == "only the last step":
        chooser.note(0, sim.x[0])
        sim.load([0, 1, 2, 3])
    q = sim.queries(0)
    with pytest.raises(RuntimeError, match="the input of layer 0 was not noted: nothing chooses the blocks of layer 1"):
        sim.step.attend(1, q[1], *sim.pools[1], scale=SCALE, out=torch.empty_like(q[1]))


def test_a_step_without_a_forecast_stops() -> None:
    sim = Simulation([300], OPTIONS, DEVICE)
    sim.load([0])
    q = sim.queries(0)
    with pytest.raises(RuntimeError, match="a forecast is to choose blocks, and there is none"):
        sim.step.attend(0, q[0], *sim.pools[0], scale=SCALE, out=torch.empty_like(q[0]))


def test_the_audit_sees_true_queries() -> None:
    sim = Chosen(1, False)
    assert sim.step.tap is not None
    sim.step.tap.arm(1, 2)
    sim.load([0, 1, 2, 3])
    sim.inputs(0)
    q = sim.queries(0)
    sim.attend(q, torch.empty_like(q))
    assert torch.equal(sim.step.tap.q, q[1, 2])
    count = int(sim.step.tap.block_counts[0])
    assert sim.step.tap.block_lists[0, :count].tolist() == sim.lists[1][2][0]


def test_with_all_blocks_a_step_is_dense() -> None:
    options: dict[str, Any] = {"min_context": 0, "audit_rate": 0}
    dense = Simulation([1, 31, 250, 330], SparseDecodeOptions(rule="all", **options), DEVICE)
    chosen = {"estimator": "strided-mean", "rule": "top-k", "top_k": 10**6, "select_by": "forecast"}
    sim = Chosen(1, False, SparseDecodeOptions(**chosen, **options))
    for each in (dense, sim):
        each.load([0, 1, 2, 3])
    q = sim.queries(0)
    outs = [torch.empty_like(q), torch.empty_like(q)]
    dense.attend(q, outs[0])
    sim.attend(q, outs[1])
    torch.testing.assert_close(*outs)


@pytest.mark.gpu
def test_a_captured_step_replays_with_other_requests() -> None:
    sim, eager = Chosen(3, True), Chosen(3, True)
    q = torch.zeros_like(sim.queries(0))
    out = torch.zeros_like(q)
    sim.load([])
    sim.attend(q, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sim.attend(q, out)
    for number in range(40):
        rows = [row for row in range(4) if (number + row) % 5]
        for each in (sim, eager):
            each.load(rows)
            each.inputs(number)
        q.copy_(sim.queries(number))
        graph.replay()
        expected = torch.full_like(q, float("nan"))
        eager.attend(q, expected)
        assert torch.equal(out, expected)
