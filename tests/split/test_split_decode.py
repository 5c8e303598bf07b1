"""Sparse decode over split keys: bit for bit that over a pool of the keys that they stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from sparse_kernels.split_keys import reconstruct

from sglang_sparse import memory
from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.split.decode import SplitDecode

GEOMETRY = Geometry(kv_heads=2, group_size=3, head_dim=64, dtype=torch.float32, page_size=32, block_size=16)
LAYERS, PAGES, MAX_PAGES, SCALE = 2, 50, 16, 0.125
OPTIONS: list[dict[str, Any]] = [
    {"gamma": 0.9},
    {"gamma": 0.9, "min_context": 150, "tail": "drop"},
    {"gamma": 0.8, "group": "every"},
    {"rule": "top-k", "top_k": 0.3},
    {"gamma": 0.9, "dense_layers": (1,)},
    {"rule": "all"},
    {"gamma_by_head": ((0.9, 0.4), (0.5, 1))},
    {"rule": "top-delta", "delta": 2.0},
    {"rule": "top-delta", "delta": 1.0, "sink_tokens": 40, "window_tokens": 70, "tail": "drop", "min_context": 150},
]


class Pair:
    """The same requests, decoded both ways."""

    def __init__(self, options: SparseDecodeOptions, lengths: list[int]) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.lengths = lengths
        sizes = {"max_requests": len(lengths) + 1, "max_pages": MAX_PAGES, "device": "cpu"}
        plain = dataclasses.replace(options, kv_format="model")
        self.plain = DecodeStep(plain, GEOMETRY, layers=LAYERS, pages=PAGES, **sizes)
        shape = (PAGES * GEOMETRY.page_size, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.k = torch.full((LAYERS, *shape), float("nan"))
        self.v = torch.full((LAYERS, *shape), float("nan"))
        self.split = SplitDecode(
            options,
            GEOMETRY,
            values=[torch.full(shape, float("nan")) for _ in range(LAYERS)],
            rows=len(lengths) + 1,
            keeps_copies=True,
            **sizes,
        )
        self.split.open_keys.fill_(float("nan"))
        page = GEOMETRY.page_size
        pages = torch.randperm(PAGES - 1, generator=self.generator) + 1
        self.table = torch.zeros(len(lengths) + 1, MAX_PAGES * page, dtype=torch.int32)
        self.pages_of = []
        for b in range(len(lengths)):
            own = pages[b * 12 : (b + 1) * 12]
            self.pages_of.append(own)
            self.table[b + 1, : 12 * page] = (own[:, None] * page + torch.arange(page)).flatten()
        self.prefill()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator) * 1.5

    def prefill(self) -> None:
        """All requests in one batch, their tokens one after another."""
        page = GEOMETRY.page_size
        slots = torch.cat([self.table[b + 1, :n] for b, n in enumerate(self.lengths)]).long()
        opened = []
        for b, length in enumerate(self.lengths):
            position = torch.arange(length)
            is_open = position // page == (length - 1) // page
            opened.append(torch.where(is_open, (b + 1) * page + position % page, -1).int())
        for layer in range(LAYERS):
            k, v = (self.normal(len(slots), GEOMETRY.kv_heads, GEOMETRY.head_dim) for _ in range(2))
            self.k[layer, slots], self.v[layer, slots] = k, v
            self.split.write_chunk(layer, k, v, slots, torch.cat(opened), self.lengths)

    def closed(self) -> torch.Tensor:
        pages = [own[: n // GEOMETRY.page_size] for own, n in zip(self.pages_of, self.lengths, strict=True)]
        return torch.cat(pages)

    def stand_in(self, layer: int) -> torch.Tensor:
        """A pool of the keys that closed pages stand for; the plain step gets their summaries."""
        codes, low_step, residual = self.split.summaries[layer]
        closed = self.closed()
        pool = self.k[layer].clone()
        whole = reconstruct(codes[closed], low_step[closed], residual[closed]).transpose(1, 2)
        pool.unflatten(0, (PAGES, GEOMETRY.page_size))[closed] = whole
        if layer in self.plain.summaries:
            for mine, theirs in zip(self.plain.summaries[layer], (codes, low_step), strict=True):
                mine.copy_(theirs)
            if self.plain.tail:
                self.plain.summaries.value_means(layer).copy_(self.split.summaries.value_means(layer))
        return pool

    def step(self, active: list[int], dense: bool = False) -> None:
        """One token for the requests in `active`; the others are padding. Compares outputs and summaries."""
        self.plain.dense = self.split.dense = dense
        for b in active:
            self.lengths[b] += 1
        batch = len(self.lengths)
        index = torch.tensor([b + 1 if b in active else 0 for b in range(batch)])
        lengths = torch.tensor([n if b in active else 0 for b, n in enumerate(self.lengths)])
        self.plain.buffers.load(self.table, index, lengths)
        self.plain.buffers.closing_pages.fill_(-1)
        places = torch.tensor([int(self.table[b + 1, self.lengths[b] - 1]) for b in range(batch)])
        # SGLang's places are as many as there are requests, without what pads the batch.
        real = max(active, default=-1) + 1
        self.split.load(self.table, index, lengths, index.int(), places[:real])
        for layer in range(LAYERS):
            q = self.normal(batch, GEOMETRY.query_heads, GEOMETRY.head_dim)
            k, v = (self.normal(batch, GEOMETRY.kv_heads, GEOMETRY.head_dim) for _ in range(2))
            self.k[layer, places[active]], self.v[layer, places[active]] = k[active], v[active]
            expected, out = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
            self.split.decode(layer, q, k, v, scale=SCALE, out=out)
            self.plain.attend(layer, q, self.stand_in(layer), self.v[layer], scale=SCALE, out=expected)
            assert torch.equal(out, expected)
            assert self.split.summaries.stale_pages(layer, self.k[layer], self.v[layer], self.closed()) == 0
            assert self.split.copies is not None
            assert torch.equal(self.split.copies[layer][places[active]], k[active])
        assert torch.equal(self.plain.buffers.request_totals, self.split.buffers.request_totals)
        assert torch.equal(self.plain.counters.kept_blocks, self.split.counters.kept_blocks)


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_split_decode_equals_decode_over_what_keys_stand_for(number: int) -> None:
    chosen = {"min_context": 64, "sink_tokens": 4, "window_tokens": 20, **OPTIONS[number]}
    options = SparseDecodeOptions(kv_format="split", **chosen)
    pair = Pair(options, [300, 31, 64, 190])
    for number in range(40):
        pair.step([b for b in range(3 if number % 7 == 0 else 4) if b != number % 5])


def test_dense_steps_between_others() -> None:
    pair = Pair(SparseDecodeOptions(kv_format="split", gamma=0.9, min_context=64), [300, 31, 64, 190])
    kept = []
    for number in range(40):
        dense = number % 10 < 8
        # A dense step that were served in turns would fail.
        pair.split.buffers.turn = 0 if dense else 4
        pair.step([0, 1, 3] if number % 3 else [1, 2], dense)
        kept.append(pair.split.buffers.request_totals[:4].sum(0))
        if dense:
            assert kept[-1][0] == kept[-1][1]
    sparse = torch.stack([totals for number, totals in enumerate(kept) if number % 10 >= 8]).sum(0)
    assert sparse[0] < 0.9 * sparse[1]


@pytest.mark.parametrize("rule", [{"gamma": 0.9}, {"rule": "top-delta", "delta": 1.0}])
def test_requests_that_are_served_in_turns(rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_STEP_BYTES", 1)
    pair = Pair(SparseDecodeOptions(kv_format="split", min_context=64, **rule), [300, 150, 220])
    assert pair.split.buffers.turn == 1
    for _ in range(5):
        pair.step([0, 1, 2])


def test_bytes_read_count_split_blocks() -> None:
    """With all blocks kept and nothing scanned: residual, codes and bounds of a block, and its values."""
    pair = Pair(SparseDecodeOptions(kv_format="split", rule="all"), [300, 31])
    rows = torch.tensor([1, 2])
    pair.split.load(pair.table, rows, torch.tensor([301, 32]), rows.int(), pair.table[rows, torch.tensor([300, 31])])
    pair.split.counters.count_step(pair.split.buffers.seq_lens[:2])
    reading = pair.split.counters.read()
    assert reading.kept_fraction == 1
    assert reading.bytes_read_fraction == pytest.approx((1 + 0.25 + 4 / 16 + 4) / 8)


@pytest.mark.parametrize("length", [100, 127])
def test_a_step_that_runs_on_writes_to_its_own_pages_after_its_row_changed_hands(length: int) -> None:
    """A request has ended, and the row is another's: what is cached in the other's pages stays as it is."""
    pair = Pair(SparseDecodeOptions(kv_format="split", gamma=0.9, min_context=64), [length, 300])
    split, own = pair.split, pair.table[1].clone()
    pair.table[1] = pair.table[2]
    page = GEOMETRY.page_size
    others = (pair.table[2][: 300 // page * page : page] // page).long()
    before = [
        [tensor[others].clone() for tensor in (*split.summaries[layer], split.values[layer].unflatten(0, (-1, page)))]
        for layer in range(LAYERS)
    ]
    place = own[length : length + 1].long()
    split.load(pair.table, torch.tensor([1]), torch.tensor([length + 1]), torch.ones(1, dtype=torch.int32), place)
    for layer in range(LAYERS):
        q, k = pair.normal(1, GEOMETRY.query_heads, GEOMETRY.head_dim), pair.normal(1, 2, GEOMETRY.head_dim)
        split.decode(layer, q, k, k, scale=SCALE, out=torch.empty_like(q))
        assert torch.equal(split.values[layer][place], k)
        after = (*split.summaries[layer], split.values[layer].unflatten(0, (-1, page)))
        for tensor, old in zip(after, before[layer], strict=True):
            assert torch.equal(tensor[others], old)
