"""A decode step over a paged cache: growing requests, padded rows, turns, and replays of one captured CUDA graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_sparse import memory, paths
from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LAYERS, PAGES, MAX_PAGES = 2, 60, 12
SCALE = 0.125

OPTIONS = [
    {"rule": "all"},
    {"gamma": 0.9},
    {"gamma": 0.9, "dense_layers": (1,)},
    {"gamma": 0.9, "group": "every", "estimator": "mean"},
    {"rule": "top-k", "top_k": 0.3, "estimator": "minmax"},
    {"rule": "top-k", "top_k": 9, "estimator": "exact"},
    {"gamma": 0.9, "estimator": "mean-variance"},
    {"gamma": 0.9, "thumbnail_bits": 2, "min_context": 150},
    {"gamma": 0.8, "tail": "drop"},
    {"gamma_by_head": ((0.9, 0.4), (0.5, 1))},
    {"rule": "top-delta", "delta": 0.1},
    {"rule": "top-delta", "delta": 0.1, "estimator": "exact", "tail": "drop"},
    {"rule": "top-delta", "delta": 0.1, "estimator": "ffd", "path": "lists"},
]
FUSED = [
    {"rule": "top-delta", "delta": 0.1, "path": "fused"},
    {"rule": "top-delta", "delta": 0.1, "path": "fused", "tail": "drop", "dense_layers": (0,), "min_context": 150},
    {"rule": "top-delta", "delta": 0.1, "path": "fused", "estimator": "ffd"},
]


def make_geometry(dtype: torch.dtype = DTYPE) -> Geometry:
    return Geometry(kv_heads=2, group_size=3, head_dim=64, dtype=dtype, page_size=32, block_size=16)


class Simulation:
    """Requests in a paged pool whose keys and values are all known beforehand."""

    def __init__(
        self, lengths: list[int], options: SparseDecodeOptions, device: str, dtype: torch.dtype = DTYPE
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.geometry = g = make_geometry(dtype)
        self.lengths = lengths
        slots = PAGES * g.page_size
        # A few strong directions: attention is peaked, as it is in a trained model.
        self.pools = [
            (torch.randn(2, slots, g.kv_heads, g.head_dim, generator=generator) * 1.5).to(dtype).to(device)
            for _ in range(LAYERS)
        ]
        pages = torch.randperm(PAGES - 1, generator=generator) + 1
        table = torch.zeros(len(lengths) + 1, MAX_PAGES * g.page_size, dtype=torch.int64)
        for row in range(len(lengths)):
            own = pages[row * MAX_PAGES : (row + 1) * MAX_PAGES]
            table[row + 1] = (own[:, None] * g.page_size + torch.arange(g.page_size)).flatten()
        self.req_to_token = table.to(torch.int32).to(device)
        self.device = device
        self.step = DecodeStep(
            options,
            g,
            layers=LAYERS,
            pages=PAGES,
            max_requests=len(lengths) + 1,
            max_pages=MAX_PAGES,
            device=device,
        )
        for row, length in enumerate(lengths):
            closed = table[row + 1, : length // g.page_size * g.page_size : g.page_size] // g.page_size
            for layer in range(LAYERS):
                self.step.summaries.update(layer, *self.pools[layer], closed.to(device))

    def queries(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + number)
        shape = (LAYERS, len(self.lengths), self.geometry.query_heads, self.geometry.head_dim)
        return (torch.randn(shape, generator=generator) * 1.5).to(self.geometry.dtype).to(self.device)

    def load(self, rows: list[int]) -> None:
        """Announces a step in which each row of `rows` has one token more; other rows are padding."""
        for row in rows:
            self.lengths[row] += 1
        index = torch.tensor([row + 1 if row in rows else 0 for row in range(len(self.lengths))], device=self.device)
        lengths = [length if row in rows else 0 for row, length in enumerate(self.lengths)]
        self.step.buffers.load(self.req_to_token, index, torch.tensor(lengths, device=self.device))

    def attend(self, q: torch.Tensor, out: torch.Tensor) -> None:
        self.step.counters.count_step(self.step.buffers.seq_lens[: len(self.lengths)])
        for layer in range(LAYERS):
            k_pool, v_pool = self.pools[layer]
            self.step.attend(layer, q[layer], k_pool, v_pool, scale=SCALE, out=out[layer])

    def listed(self, layer: int, row: int, head: int) -> list[int]:
        """Blocks that the last attention of the last layer read (all, in a layer without lists)."""
        blocks = -(-self.lengths[row] // self.geometry.block_size)
        if layer not in self.step.summaries:
            return list(range(blocks))
        count = int(self.step.buffers.block_counts[layer, row, head])
        return self.step.buffers.block_lists[row, head, :count].tolist()

    def expected(self, layer: int, row: int, q: torch.Tensor) -> torch.Tensor:
        """Attention over the listed blocks in float64; with a tail, also over the means of the pages of the others."""
        g, length = self.geometry, self.lengths[row]
        slots = self.req_to_token[row + 1, :length].long()
        out = torch.empty(g.query_heads, g.head_dim, dtype=torch.float64)
        for head in range(g.query_heads):
            kv_head = head // g.group_size
            kept = torch.zeros(length, dtype=torch.bool)
            for block in self.listed(layer, row, kv_head):
                kept[block * g.block_size : (block + 1) * g.block_size] = True
            k, v = (pool[slots, kv_head].double().cpu() for pool in self.pools[layer])
            scores, values = [k[kept] @ q[layer, row, head].double().cpu() * SCALE], [v[kept]]
            if self.step.options.resolved_tail == "mean" and not kept.all():
                mass = self.step.buffers.log_mass[row, kv_head, head % g.group_size].double().cpu()
                for block in (~kept[:: g.block_size]).nonzero().flatten().tolist():
                    page = block * g.block_size // g.page_size * g.page_size
                    scores.append(mass[block : block + 1])
                    values.append(v[page : page + g.page_size].mean(0, keepdim=True))
            out[head] = torch.softmax(torch.cat(scores), 0) @ torch.cat(values)
        return out


def lengths() -> list[int]:
    return [1, 31, 200, 290]


@pytest.mark.parametrize("changes", OPTIONS, ids=str)
@pytest.mark.parametrize("turns", [False, True])
def test_growing_requests_attend_to_their_lists(changes: dict, turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if turns:
        monkeypatch.setattr(memory, "MAX_STEP_BYTES", 1)
    options = SparseDecodeOptions(**{"min_context": 0, "sink_tokens": 4, "window_tokens": 16, **changes})
    sim = Simulation(lengths(), options, DEVICE)
    assert sim.step.buffers.turn == (1 if turns else len(lengths()) + 1)
    last = LAYERS - 1
    for number in range(40):
        rows = [row for row in range(4) if (number + row) % 5]
        sim.load(rows)
        q = sim.queries(number)
        out = torch.full_like(q, float("nan"))
        sim.attend(q, out)
        for row in range(4):
            if row not in rows:
                assert (out[:, row] == 0).all()
            elif not turns:
                # Selection buffers are shared by layers and turns: they show the last of them.
                torch.testing.assert_close(
                    out[last, row].double().cpu(),
                    sim.expected(last, row, q),
                    atol=2e-2 if torch.float32 != DTYPE else 1e-4,
                    rtol=1e-2,
                )
    for row, length in enumerate(sim.lengths):
        pages = sim.req_to_token[row + 1, : length // 32 * 32 : 32].long() // 32
        for layer in range(LAYERS):
            assert sim.step.summaries.stale_pages(layer, *sim.pools[layer], pages) == 0
    reading = sim.step.counters.read()
    assert reading.steps == 40
    assert reading.kept_fraction is not None
    assert (reading.kept_fraction == 1) == (options.rule == "all")


def test_turns_give_what_one_turn_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    outs = []
    for limit in (memory.MAX_STEP_BYTES, 1):
        monkeypatch.setattr(memory, "MAX_STEP_BYTES", limit)
        sim = Simulation(lengths(), SparseDecodeOptions(min_context=0, window_tokens=16, gamma=0.8), DEVICE)
        sim.load([0, 1, 2, 3])
        out = torch.empty_like(sim.queries(0))
        sim.attend(sim.queries(0), out)
        outs.append((out, sim.step.counters.kept_blocks.clone()))
    torch.testing.assert_close(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])
    assert 0 < outs[0][1].sum() < LAYERS * 2 * (1 + 2 + 13 + 19)


ONE_GAMMA = {"min_context": 0, "sink_tokens": 0, "window_tokens": 1}


def test_each_layer_has_its_own_gamma() -> None:
    options = SparseDecodeOptions(min_context=0, sink_tokens=0, window_tokens=1, gamma_by_layer=(0.99, 0.3))
    sim = Simulation(lengths(), options, DEVICE)
    sim.load([0, 1, 2, 3])
    q = sim.queries(0)
    sim.attend(q, torch.empty_like(q))
    kept = sim.step.counters.kept_blocks.sum(1)
    for layer, gamma in enumerate(options.gamma_by_layer):
        alone = Simulation(lengths(), SparseDecodeOptions(**{**ONE_GAMMA, "gamma": gamma}), DEVICE)
        alone.load([0, 1, 2, 3])
        alone.attend(q, torch.empty_like(q))
        assert alone.step.counters.kept_blocks.sum(1)[layer] == kept[layer]
    assert kept[0] > kept[1]


@pytest.mark.parametrize("turns", [False, True])
def test_each_head_has_its_own_gamma(turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and counts of a head are those of a step in which its gamma is everyone's."""
    if turns:
        monkeypatch.setattr(memory, "MAX_STEP_BYTES", 1)
    by_head = ((0.99, 0.3), (0.5, 1.0))
    sim = Simulation(lengths(), SparseDecodeOptions(**ONE_GAMMA, gamma_by_head=by_head), DEVICE)
    sim.load([0, 1, 2, 3])
    q = sim.queries(0)
    out = torch.empty_like(q)
    sim.attend(q, out)
    kept = sim.step.counters.kept_blocks
    group = sim.geometry.group_size
    for layer, gammas in enumerate(by_head):
        for head, gamma in enumerate(gammas):
            alone = Simulation(lengths(), SparseDecodeOptions(**{**ONE_GAMMA, "gamma": gamma}), DEVICE)
            alone.load([0, 1, 2, 3])
            expected = torch.empty_like(q)
            alone.attend(q, expected)
            own = slice(head * group, (head + 1) * group)
            torch.testing.assert_close(out[layer, :, own], expected[layer, :, own])
            if gamma < 1:
                assert alone.step.counters.kept_blocks[layer, head] == kept[layer, head]
    assert kept[0, 0] > kept[0, 1]
    assert kept[1, 0] < kept[1, 1] == sum(-(-length // 16) for length in sim.lengths)


@pytest.mark.parametrize("estimator", ["thumbnail", "exact"])
def test_the_tail_brings_a_step_closer_to_dense_attention(estimator: str) -> None:
    outs = {}
    for changes in ({"tail": "mean"}, {"tail": "drop"}, {"rule": "all"}):
        options = SparseDecodeOptions(
            **{"min_context": 0, "sink_tokens": 4, "window_tokens": 16, "gamma": 0.6, "estimator": estimator, **changes}
        )
        sim = Simulation(lengths(), options, DEVICE)
        sim.load([0, 1, 2, 3])
        out = torch.empty_like(sim.queries(0))
        sim.attend(sim.queries(0), out)
        outs[next(iter(changes.values()))] = out.double()
    errors = {name: (out - outs["all"]).norm(dim=-1)[:, 2:] for name, out in outs.items()}
    assert (errors["drop"] > 0).all()
    assert errors["mean"].mean() < 0.8 * errors["drop"].mean()


def test_rows_that_read_everything_are_the_same_with_and_without_tail() -> None:
    outs = []
    for changes in ({"tail": "mean"}, {"tail": "drop"}):
        sim = Simulation(
            lengths(), SparseDecodeOptions(min_context=250, window_tokens=16, gamma=0.6, **changes), DEVICE
        )
        sim.load([0, 2, 3])
        out = torch.full_like(sim.queries(0), float("nan"))
        sim.attend(sim.queries(0), out)
        outs.append(out)
    assert torch.equal(outs[0][:, :3], outs[1][:, :3])
    assert not torch.equal(outs[0][:, 3], outs[1][:, 3])


def test_the_tail_is_counted_as_scanned() -> None:
    read = []
    for tail in ("drop", "mean"):
        sim = Simulation([320], SparseDecodeOptions(min_context=0, window_tokens=16, tail=tail), DEVICE)
        sim.lengths = [319]
        sim.load([0])
        out = torch.empty_like(sim.queries(0))
        sim.attend(sim.queries(0), out)
        reading = sim.step.counters.read()
        assert reading.bytes_read_fraction is not None
        read.append(reading.bytes_read_fraction)
    # One value for each page of 32 tokens, beside 32 keys and 32 values.
    assert read[1] - read[0] == pytest.approx(1 / 64)


@pytest.mark.parametrize("changes", FUSED, ids=str)
@pytest.mark.parametrize(
    # On a CPU no kernel runs that would share anything out.
    "aligned_programs",
    [pytest.param(1, id="rows aligned"), pytest.param(10**9, id="rows not aligned", marks=pytest.mark.gpu)],
)
def test_the_fused_pass_gives_what_lists_give(
    changes: dict, aligned_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparse_kernels._fused_shares.ALIGNED_PROGRAMS", aligned_programs)
    base = {"min_context": 0, "sink_tokens": 4, "window_tokens": 16, **changes}
    fused, lists = (
        Simulation(lengths(), SparseDecodeOptions(**{**base, "path": path}), DEVICE) for path in ("fused", "lists")
    )
    assert fused.step.buffers.log_mass.numel() == fused.step.buffers.block_lists.numel() == 0
    others = 0
    for number in range(40):
        rows = [row for row in range(4) if (number + row) % 5]
        q = fused.queries(number)
        outs = []
        for simulation in (fused, lists):
            simulation.load(rows)
            outs.append(torch.full_like(q, float("nan")))
            simulation.attend(q, outs[-1])
        if DEVICE == "cpu":
            torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-2)
            assert torch.equal(fused.step.buffers.block_counts, lists.step.buffers.block_counts)
            assert torch.equal(fused.step.buffers.request_totals, lists.step.buffers.request_totals)
        else:
            by_row = [out.unflatten(2, (fused.geometry.kv_heads, -1)).flatten(3) for out in outs]
            others += int((~torch.isclose(*by_row, atol=5e-2, rtol=1e-2)).any(-1).sum())
            assert not outs[0].isnan().any()
            counts = [simulation.step.buffers.block_counts[:, : q.shape[1]] for simulation in (fused, lists)]
            assert (counts[0] - counts[1]).abs().max() <= 2
        for layer in fused.step.sparse_layers:
            # What the next step shares its work out by.
            assert torch.equal(fused.step.buffers.last_kept[layer], fused.step.buffers.block_counts[layer])
    # Rounded otherwise, a block at the threshold may be on its other side; a step is 2.5% of all rows.
    assert others <= 0.02 * 40 * LAYERS * 4 * fused.geometry.kv_heads
    reading = fused.step.counters.read()
    assert reading.kept_fraction is not None
    assert reading.kept_fraction < 1
    expected = lists.step.counters.read()
    assert reading.kept_fraction == pytest.approx(expected.kept_fraction, abs=0 if DEVICE == "cpu" else 0.02)
    assert reading.bytes_read_fraction == pytest.approx(expected.bytes_read_fraction, abs=0.02)


def test_auto_picks_by_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SparseDecodeOptions(rule="top-delta", delta=0.1, min_context=0, window_tokens=16)
    monkeypatch.setattr(paths, "FUSED_BATCHES", {(options.thumbnail_bits, True): (1, 2, 4)})
    # As on a device with so many programs that two requests have 32 for each row.
    monkeypatch.setattr(paths, "fused_rows_are_aligned", lambda batch, *_, **__: batch <= 2)

    def described(**changes: object) -> str:
        return str(paths.Paths.of(replace(options, **changes), make_geometry(), DEVICE))

    assert described() == "fused at batch 1, 2, else lists (chosen by auto)"
    assert described(thumbnail_bits=3) == "lists (chosen by auto)"
    assert described(tail="drop") == "lists (chosen by auto)"
    assert described(path="lists") == "lists"
    assert described(path="fused") == "fused"
    assert described(rule="coverage", delta=None) == "lists"
    taken = []
    original = DecodeStep._attend_fused

    def attend(self: DecodeStep, layer: int, q: torch.Tensor, *rest: object) -> None:
        taken.append(len(q))
        original(self, layer, q, *rest)

    monkeypatch.setattr(DecodeStep, "_attend_fused", attend)
    for count in (1, 2, 3):
        sim = Simulation(lengths()[:count], options, DEVICE)
        sim.load(list(range(count)))
        out = torch.full_like(sim.queries(0), float("nan"))
        sim.attend(sim.queries(0), out)
        assert not out.isnan().any()
    assert taken == [1, 1, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [*OPTIONS, *FUSED], ids=str)
def test_a_captured_step_replays_with_other_requests(changes: dict) -> None:
    """One graph, captured on padding alone, replayed while requests come, grow over page borders and go."""
    options = SparseDecodeOptions(**{"min_context": 0, "sink_tokens": 4, "window_tokens": 16, **changes})
    sim, eager = Simulation(lengths(), options, "cuda"), Simulation(lengths(), options, "cuda")
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
        for simulation in (sim, eager):
            simulation.load(rows)
        q.copy_(sim.queries(number))
        out.fill_(float("nan"))
        graph.replay()
        expected = torch.full_like(q, float("nan"))
        eager.attend(q, expected)
        assert torch.equal(out, expected)
        assert not out.isnan().any()
    assert torch.equal(sim.step.counters._counts, eager.step.counters._counts)
    for layer in range(LAYERS):
        for kept, made in (
            zip(sim.step.summaries[layer], eager.step.summaries[layer], strict=True)
            if layer in sim.step.summaries
            else ()
        ):
            assert torch.equal(kept.view(torch.uint8), made.view(torch.uint8))
        if sim.step.tail and layer in sim.step.summaries:
            assert torch.equal(sim.step.summaries.value_means(layer), eager.step.summaries.value_means(layer))


@pytest.mark.parametrize("estimator", ["thumbnail", "ffd", "mean", "mean-variance", "minmax", "exact"])
@pytest.mark.parametrize(
    "rule", [{"gamma": 0.9}, {"rule": "top-k", "top_k": 1}, {"rule": "top-k", "top_k": 0.99}], ids=str
)
@pytest.mark.parametrize("group", ["average", "every"])
def test_odd_shapes_give_numbers(estimator: str, rule: dict, group: str) -> None:
    """One token, padded rows, blocks of a whole page, windows beyond the context, group sizes 1 and 16."""
    for group_size, page_size, block_size, sink, window in ((1, 16, 16, 0, 1), (16, 128, 64, 1000, 5000)):
        geometry = Geometry(2, group_size, 96, torch.float32, page_size, block_size)
        options = SparseDecodeOptions(
            estimator=estimator, group=group, min_context=0, sink_tokens=sink, window_tokens=window, **rule
        )
        step = DecodeStep(options, geometry, layers=1, pages=10, max_requests=4, max_pages=9, device=DEVICE)
        k_pool, v_pool = torch.randn(2, 10 * page_size, 2, 96, device=DEVICE)
        step.summaries.update(0, k_pool, v_pool, torch.arange(1, 10, dtype=torch.int32, device=DEVICE))
        table = torch.arange(page_size, 10 * page_size, dtype=torch.int32, device=DEVICE).repeat(5, 1)
        for lengths_now in ([1], [0, 1, page_size], [9 * page_size, page_size - 1, 2, 0]):
            count = len(lengths_now)
            step.buffers.load(
                table, torch.arange(count, device=DEVICE), torch.tensor(lengths_now, dtype=torch.int64, device=DEVICE)
            )
            q = torch.randn(count, geometry.query_heads, 96, device=DEVICE)
            out = torch.full_like(q, float("nan"))
            step.attend(0, q, k_pool, v_pool, scale=0.1, out=out)
            assert not out.isnan().any()
