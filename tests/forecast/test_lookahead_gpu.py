"""Forecasts in a captured step on a GPU: scores and copies beside the forward stream, results as without them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "offload"))

from test_gpu import GEOMETRY, LAYERS, LENGTHS, SCALE, Captured

from sglang_sparse.forecast.lookahead import Lookahead

pytestmark = pytest.mark.gpu

HIDDEN = 128


class Projected:
    """Queries from the input by a fixed projection, rotated by nothing."""

    name, bytes = "projected", 0

    def __init__(self, per_head: int) -> None:
        self.per_head = per_head
        rows = GEOMETRY.kv_heads * per_head * GEOMETRY.head_dim
        generator = torch.Generator("cuda").manual_seed(1)
        self.weight = torch.randn((rows, HIDDEN), generator=generator, device="cuda").bfloat16() / HIDDEN**0.5

    def __contains__(self, layer: int) -> bool:
        return 0 < layer < LAYERS

    def vectors(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, self.weight).float()
        return y.unflatten(-1, (GEOMETRY.kv_heads, self.per_head, GEOMETRY.head_dim))


class Ahead(Captured):
    """Steps whose layers' inputs are noted."""

    def __init__(self, slots: int, per_head: int, budget: int) -> None:
        super().__init__(slots, forecast=True)
        self.lookahead = self.offloaded.lookahead = Lookahead(
            Projected(per_head),
            self.offloaded,
            scales=[SCALE] * LAYERS,
            hidden=HIDDEN,
            dtype=torch.bfloat16,
            budget=budget,
        )
        self.x = [torch.zeros((len(LENGTHS), HIDDEN), dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]

    def decode(self) -> None:
        step = self.offloaded
        for layer in range(LAYERS):
            # A tensor that is freed while the forecast runs, as a layer's activations are.
            self.lookahead.note(layer, self.x[layer] * 1)
            step.decode(layer, self.q[layer], self.new_k[layer], self.new_v[layer], scale=SCALE, out=self.out[layer])


@pytest.mark.parametrize(("slots", "per_head", "budget"), [(0, 4, 64), (40, 1, 1000), (600, 4, 64)])
def test_replays_with_forecasts_equal_decode_from_one_pool(slots: int, per_head: int, budget: int) -> None:
    pair = Ahead(slots, per_head, budget)
    pair.load([])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pair.decode()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair.decode()
    for number in range(30):
        pair.load([b for b in range(len(LENGTHS)) if b != number % 6])
        for tensor in (*pair.q, *pair.x):
            tensor.normal_(generator=pair.generator)
        graph.replay()
        for layer in range(LAYERS):
            expected = torch.full_like(pair.out[layer], float("nan"))
            pair.plain.attend(layer, pair.q[layer], pair.k[layer], pair.v[layer], scale=SCALE, out=expected)
            torch.testing.assert_close(pair.out[layer].float(), expected.float(), rtol=2e-2, atol=2e-2)
    totals = pair.lookahead.totals.tolist()
    assert totals[0] == [0, 0]
    for prefetched, used in totals[1:]:
        assert (prefetched > 0) == (slots > 0)
        assert 0 <= used <= prefetched <= 30 * budget
    for layer, maps in enumerate(pair.offloaded.cache.maps):
        for h in range(GEOMETRY.kv_heads):
            (blocks,) = (maps.slot_map[h] >= 0).nonzero(as_tuple=True)
            held = maps.slot_map[h, blocks].long()
            assert torch.equal(maps.slot_block[h, held].long(), blocks)
            host = pair.offloaded.host.blocks[layer][(blocks // 4).cpu(), h, (blocks % 4).cpu()]
            assert torch.equal(pair.offloaded.cache.hot[layer][h, held].cpu(), host)


def test_the_forecast_of_a_replay_is_that_of_a_step_without_a_graph() -> None:
    made = []
    for captured in (False, True):
        pair = Ahead(600, 4, 64)
        pair.load([])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pair.decode()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                pair.decode()
        pair.load(list(range(len(LENGTHS))))
        for tensor in (*pair.q, *pair.x):
            tensor.normal_(generator=torch.Generator("cuda").manual_seed(3))
        if captured:
            graph.replay()
        else:
            pair.decode()
        torch.cuda.synchronize()
        made.append((pair.lookahead.totals.clone(), (pair.offloaded.cache.maps[1].slot_map >= 0).clone()))
    assert torch.equal(made[0][0], made[1][0])
    assert made[0][0][1:, 0].min() > 0
    assert torch.equal(made[0][1], made[1][1])
