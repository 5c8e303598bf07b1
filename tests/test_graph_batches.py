"""CUDA graphs of several batch sizes share one decode step: nothing that one of them left behind reaches another."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from test_decode_step import FUSED, LAYERS, SCALE, Simulation, lengths

from sglang_sparse.options import SparseDecodeOptions

BATCHES = (4, 2, 1)
"""The largest first, as SGLang captures them."""
CHOICES = [
    {"rule": "all"},
    {"gamma": 0.9},
    {"gamma": 0.9, "group": "every", "estimator": "mean"},
    {"rule": "top-k", "top_k": 0.3, "estimator": "minmax"},
    # Graphs up to one batch size take the fused pass, and others lists.
    {"rule": "top-delta", "delta": 0.1, "thumbnail_bits": 4},
    *FUSED,
]


def load(sim: Simulation, requests: list[int], batch: int) -> None:
    """Announces a batch of `requests`, each with one token more, padded to `batch` rows."""
    for request in requests:
        sim.lengths[request] += 1
    padding = [0] * (batch - len(requests))
    index = torch.tensor([*(request + 1 for request in requests), *padding], device=sim.device)
    now = torch.tensor([*(sim.lengths[request] for request in requests), *padding], device=sim.device)
    sim.step.buffers.load(sim.req_to_token, index, now)


def attend(sim: Simulation, q: torch.Tensor, out: torch.Tensor, batch: int) -> None:
    sim.step.counters.count_step(sim.step.buffers.seq_lens[:batch], dense=sim.step.dense)
    for layer in range(LAYERS):
        sim.step.attend(layer, q[layer, :batch], *sim.pools[layer], scale=SCALE, out=out[layer, :batch])


def capture(run: Callable[[], None]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@pytest.mark.gpu
@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_replays_in_any_order_of_batch_sizes_equal_eager_steps(changes: dict) -> None:
    options = SparseDecodeOptions(**{"min_context": 0, "sink_tokens": 4, "window_tokens": 16, **changes})
    sim, eager = Simulation(lengths(), options, "cuda"), Simulation(lengths(), options, "cuda")
    q = torch.zeros_like(sim.queries(0))
    out = torch.zeros_like(q)
    replays = {}
    for batch in BATCHES:
        load(sim, [], batch)
        replays[batch] = capture(lambda: attend(sim, q, out, batch))  # noqa: B023
    generator = random.Random(3)
    for number in range(60):
        batch = generator.choice(BATCHES)
        # In any order, long before short and the other way round; at times fewer than the graph is for.
        requests = generator.sample(range(4), generator.randint(1, batch))
        q.copy_(sim.queries(number))
        expected = torch.full_like(q, float("nan"))
        load(eager, requests, batch)
        attend(eager, q, expected, batch)
        out.fill_(float("nan"))
        load(sim, requests, batch)
        replays[batch]()
        assert torch.equal(out[:, :batch], expected[:, :batch])
        assert not out[:, :batch].isnan().any()
        assert out[:, batch:].isnan().all()
    assert torch.equal(sim.step.counters._counts, eager.step.counters._counts)
