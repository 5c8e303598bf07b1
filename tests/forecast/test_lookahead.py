"""Forecasts in decode steps: they change what is fetched when, and nothing else, whatever they say."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "offload"))

from test_decode import GEOMETRY, LAYERS, OPTIONS, SCALE, Pair

from sglang_sparse import memory
from sglang_sparse.forecast.chooser import ForecastChooser
from sglang_sparse.forecast.lookahead import Lookahead, report
from sglang_sparse.offload.ordering import OrderError, OrderLog
from sglang_sparse.options import SparseDecodeOptions

HIDDEN = 8
LENGTHS = [300, 31, 64, 190]


class Noise:
    """A forecast that knows nothing; with `bad` it is not even a number."""

    name, bytes = "noise", 0

    def __init__(self, per_head: int, bad: bool = False) -> None:
        self.per_head, self.bad = per_head, bad
        self.generator = torch.Generator().manual_seed(7)

    def __contains__(self, layer: int) -> bool:
        return 0 < layer < LAYERS

    def vectors(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        shape = (len(x), GEOMETRY.kv_heads, self.per_head, GEOMETRY.head_dim)
        made = torch.randn(shape, generator=self.generator)
        return made * float("nan") if self.bad else made


class Ahead(Pair):
    """A pair whose offloaded side prefetches."""

    def __init__(
        self, forecast: Any, slots: int, budget: int = 10**6, lengths: Sequence[int] = LENGTHS, **options: Any
    ) -> None:
        given = {"gamma": 0.9, "min_context": 64, "sink_tokens": 4, "window_tokens": 20, "audit_rate": 0, **options}
        super().__init__(SparseDecodeOptions(**given), slots, list(lengths))
        offloaded = self.offloaded
        made = Lookahead(
            forecast, offloaded, scales=[SCALE] * LAYERS, hidden=HIDDEN, dtype=torch.float32, budget=budget
        )
        self.lookahead = offloaded.lookahead = made
        decode = offloaded.decode

        def noting(layer: int, q: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            made.note(layer, torch.randn(len(q), HIDDEN))
            decode(layer, q, *args, **kwargs)

        offloaded.decode = noting  # type: ignore[method-assign]

    @property
    def totals(self) -> tuple[int, int]:
        prefetched, used = self.lookahead.totals.sum(0).tolist()
        return prefetched, used


@pytest.mark.parametrize("slots", [0, 7, 200])
@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_any_forecast_leaves_the_results_as_they_are(slots: int, number: int) -> None:
    pair = Ahead(Noise(per_head=1 + number % 3), slots, **OPTIONS[number])
    for step in range(20):
        pair.step([b for b in range(3 if step % 7 == 0 else 4) if b != step % 5])
    prefetched, used = pair.totals
    assert (prefetched > 0) == (slots > 0)
    assert 0 <= used <= prefetched
    assert pair.lookahead.totals[0].tolist() == [0, 0]


class Known(Noise):
    """A forecast that depends on its input alone."""

    def vectors(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        shape = (len(x), GEOMETRY.kv_heads, self.per_head, GEOMETRY.head_dim)
        weight = torch.randn(HIDDEN, math.prod(shape[1:]), generator=torch.Generator().manual_seed(5))
        return (x @ weight).view(shape)


class Chosen(Ahead):
    """On both sides the forecast chooses what is read; the offloaded side prefetches by it too."""

    def __init__(self, slots: int, **options: Any) -> None:
        super().__init__(Known(1), slots, select_by="forecast", **options)
        choosers = []
        for side in (self.plain, self.offloaded):
            sizes: dict[str, Any] = {"max_requests": len(LENGTHS) + 1, "hidden": HIDDEN}
            side.chooser = ForecastChooser(Known(1), GEOMETRY, dtype=torch.float32, device="cpu", **sizes)
            choosers.append(side.chooser)
        attend, inputs = self.plain.attend, torch.Generator().manual_seed(9)
        prefetching = self.lookahead.note

        def noting(layer: int, q: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if layer == 0:
                choosers[0].begin(len(q))
            self.x = torch.randn(len(q), HIDDEN, generator=inputs)
            choosers[0].note(layer, self.x)
            attend(layer, q, *args, **kwargs)

        def note_both(layer: int, x: torch.Tensor) -> None:
            prefetching(layer, self.x)
            choosers[1].note(layer, self.x)

        self.plain.attend = noting  # type: ignore[method-assign]
        self.lookahead.note = note_both  # type: ignore[method-assign]


STRIDED = {"estimator": "strided-mean", "rule": "top-k", "top_k": 0.4, "gamma": 0.975}


@pytest.mark.parametrize(("slots", "options"), [(0, {"gamma": 0.8}), (7, STRIDED), (200, STRIDED)])
def test_a_forecast_that_chooses_chooses_the_same_under_offload(slots: int, options: dict[str, Any]) -> None:
    pair = Chosen(slots, **options)
    for step in range(20):
        pair.step([b for b in range(3 if step % 7 == 0 else 4) if b != step % 5])
    prefetched, used = pair.totals
    assert (used > 0) == (slots > 0)
    assert used <= prefetched
    if slots == 200:
        first, second = pair.offloaded.cache.totals[:, 1].tolist()
        assert second < first / 10, "what is chosen has been prefetched"


def test_forecasts_that_are_no_numbers_do_no_harm() -> None:
    pair = Ahead(Noise(1, bad=True), 30)
    for _ in range(3):
        pair.step([0, 1, 2, 3])


def test_requests_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_STEP_BYTES", 1)
    pair = Ahead(Noise(3), 30)
    assert pair.lookahead.turn == pair.offloaded.buffers.turn == 1
    for _ in range(5):
        pair.step([0, 1, 2, 3])
    assert pair.totals[0] > 0


def test_what_is_certain_is_prefetched_and_counted() -> None:
    """Requests below the minimum context read everything: a layer with a forecast misses nothing any more."""
    pair = Ahead(Noise(1), 200, min_context=10**6)
    pair.step([0, 1, 2, 3])

    def full_blocks() -> int:
        pages = sum((n - 1) // GEOMETRY.page_size for n in pair.lengths)
        return pages * GEOMETRY.blocks_per_page * GEOMETRY.kv_heads

    blocks = full_blocks()
    assert pair.totals == (blocks, blocks)
    assert pair.offloaded.cache.totals[:, 1].tolist() == [blocks, 0]
    shown = report(pair.lookahead, misses=blocks, block_bytes=10)
    assert shown["prefetched_bytes"] == shown["used_bytes"] == 10 * blocks
    assert shown["wasted_bytes"] == 0
    assert shown["hidden_share"] == 0.5
    pair.step([0, 1, 2, 3])
    assert full_blocks() > blocks, "a page was filled"
    assert pair.totals == (full_blocks(),) * 2, "what is in a slot is not prefetched again"


@pytest.mark.parametrize("length", [301, 316, 320, 321])
def test_the_budget_goes_to_the_most_probable_blocks(length: int) -> None:
    """Those of the largest shares, of all tokens whose keys are there, among blocks in no slot and in full pages."""
    pair = Ahead(Noise(1), 200, 5, [length - 1, *LENGTHS[1:]], estimator="mean", block_size=16)
    lookahead = pair.lookahead
    pair.step([0, 3])
    lengths = torch.tensor([pair.lengths[0], 0, 0, 0])
    place = pair.table[1, pair.lengths[0] - 1 :][:1].long()
    pair.offloaded.load(pair.table, torch.tensor([1, 0, 0, 0]), lengths, torch.ones(4, dtype=torch.int32), place)
    lookahead.note(0, torch.zeros(4, HIDDEN))
    lookahead.plan()
    size = GEOMETRY.page_size
    # Of a page that the step fills nothing is scored.
    full, opened = divmod(length - size if length % size == 0 else length - 1, size)
    # The step's own key is not there yet: in its place is what a page left that was open before.
    pair.offloaded.cache.open_k[1][size + opened : 2 * size] = float("nan")
    seed = lookahead.forecast.generator.get_state()  # type: ignore[attr-defined]
    lookahead.score(0)
    lookahead.forecast.generator.set_state(seed)  # type: ignore[attr-defined]
    (vectors,) = lookahead.forecast.vectors(1, torch.zeros(4, HIDDEN), torch.zeros(4))[:1]
    pages = pair.k[1].unflatten(0, (-1, size))[pair.pages_of[0][: full + 1]]
    means = pages[:full].flatten(0, 1).unflatten(0, (-1, 16)).mean(1)
    closed = torch.einsum("hrd,nhd->hn", vectors, means) * SCALE + math.log(16)
    tokens = torch.einsum("hrd,nhd->hn", vectors, pages[full, :opened]) * SCALE
    shares = torch.cat([closed, tokens.logsumexp(-1, keepdim=True)], 1).softmax(-1)[:, :-1]
    slots = pair.offloaded.cache.maps[1].slot_map
    numbers = (pair.pages_of[0][:full, None] * GEOMETRY.blocks_per_page + torch.arange(2)).flatten()
    shares[slots[:, numbers] >= 0] = -1
    best = shares.flatten().topk(5).indices
    expected = {(int(i) // len(numbers), int(i) % len(numbers)) for i in best}
    counts = lookahead._counts[0].tolist()
    found = {(h, int(j)) for h, count in enumerate(counts) for j in lookahead._lists[0, h, :count]}
    assert found == expected
    assert lookahead._counts[1:].sum() == 0


def test_where_nothing_is_missed_nothing_is_scored_until_something_is() -> None:
    """All blocks fit into the slots: what is prefetched shrinks to nothing, and comes back when requests do."""
    pair = Ahead(Noise(1), 200, budget=40)
    for _ in range(25):
        pair.step([0, 1])
    # A page that closes is missed once.
    quiet = []
    for _ in range(20):
        pair.step([0, 1])
        quiet.append(pair.lookahead.budgets.tolist())
    assert quiet.count([0] * LAYERS) > 5
    prefetched, _ = pair.totals
    for maps in pair.offloaded.cache.maps:
        # As if others had taken all slots meanwhile.
        maps.slot_map.fill_(-1)
        maps.slot_block.fill_(-1)
    for _ in range(3):
        pair.step([0, 1])
    assert pair.lookahead.budgets[1:].min() > 0
    assert pair.totals[0] > prefetched


class Forgetful(OrderLog):
    """Forgets to wait for one kind of event."""

    def __init__(self, event: str) -> None:
        super().__init__()
        self.forgotten = event

    def wait(self, event: str) -> None:
        if not event.startswith(self.forgotten):
            super().wait(event)


@pytest.mark.parametrize("event", ["fork", "prefetched"])
def test_an_order_that_is_left_out_is_found(event: str) -> None:
    pair = Ahead(Noise(1), 30)
    pair.step([0, 1, 2, 3])
    pair.offloaded.offload.streams = Forgetful(event)
    with pytest.raises(OrderError):
        pair.step([0, 1, 2, 3])


def test_scores_run_beside_the_forward_stream() -> None:
    pair = Ahead(Noise(1), 30)
    pair.step([0, 1, 2, 3])
    log = pair.offloaded.offload.streams
    assert isinstance(log, OrderLog)
    names = [(each.name, each.stream) for each in log.operations]
    assert names.count(("score", "prefetch")) == 1
    scored = names.index(("score", "prefetch"))
    stored = names.index(("store", "forward"), names.index(("epoch", "forward")))
    assert scored < stored, "as soon as the input is there"
    fetched = names.index(("gather", "prefetch"))
    assert names.index(("gather", "forward")) < fetched < names.index(("attention", "forward"))


def test_inputs_of_other_forwards_are_not_noted() -> None:
    pair = Ahead(Noise(1), 30)
    pair.step([0, 1, 2, 3])
    before = pair.lookahead._inputs.clone()
    pair.lookahead.begin(0)
    pair.lookahead.note(0, torch.ones(4, HIDDEN))
    assert torch.equal(pair.lookahead._inputs, before)


def test_weights_and_buffers_are_reserved(tmp_path: Path) -> None:
    heads = tmp_path / "heads.safetensors"
    heads.write_bytes(bytes(12345))

    def reserved(forecast: str | None) -> int:
        options = SparseDecodeOptions(offload=True, audit_rate=0, forecast=forecast)
        return memory.step_buffer_bytes(options, GEOMETRY, layers=LAYERS, max_pages=16, max_requests=5)

    assert reserved(None) == reserved("query") == reserved("none") + memory.forecast_bytes(GEOMETRY, 16, 5)
    assert reserved(str(heads)) == reserved("query") + 12345


def test_buffers_are_those_that_are_reserved() -> None:
    pair = Ahead(Noise(GEOMETRY.group_size), 30)
    made = pair.lookahead
    own = sum(t.nbytes for t in (made._log_mass, made._lists, made._counts, *vars(made._expected).values()))
    assert own <= memory.forecast_bytes(GEOMETRY, pair.table.shape[1] // GEOMETRY.page_size, len(LENGTHS) + 1)
