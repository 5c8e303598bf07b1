"""Sparse decode with its estimators and rules, keys and values offloaded or all in one pool: the same, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang_sparse import memory
from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.offload.decode import OffloadedDecode
from sglang_sparse.offload.ordering import OrderLog
from sglang_sparse.options import SparseDecodeOptions

GEOMETRY = Geometry(kv_heads=2, group_size=3, head_dim=64, dtype=torch.float32, page_size=32, block_size=16)
LAYERS, PAGES, MAX_PAGES, SCALE = 2, 50, 16, 0.125
OPTIONS = [
    {"gamma": 0.9},
    {"gamma": 0.9, "thumbnail_bits": 2, "min_context": 150},
    {"gamma": 0.8, "tail": "drop", "group": "every"},
    {"rule": "top-k", "top_k": 0.3, "estimator": "minmax"},
    {"gamma": 0.9, "estimator": "mean-variance"},
    {"gamma_by_head": ((0.9, 0.4), (0.5, 1))},
]


class Pair:
    """The same requests, decoded both ways."""

    def __init__(self, options: SparseDecodeOptions, slots: int, lengths: list[int]) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.lengths = lengths
        sizes = {"max_requests": len(lengths) + 1, "max_pages": MAX_PAGES, "device": "cpu"}
        self.plain = DecodeStep(options, GEOMETRY, layers=LAYERS, pages=PAGES, **sizes)
        self.offloaded = OffloadedDecode(
            dataclasses.replace(options, offload=True),
            GEOMETRY,
            pages=PAGES,
            slots=[slots] * LAYERS,
            rows=len(lengths) + 1,
            streams=OrderLog(),
            **sizes,
        )
        shape = (LAYERS, PAGES * GEOMETRY.page_size, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.k, self.v = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
        for tensor in (self.offloaded.host.blocks, self.offloaded.cache.open_k, self.offloaded.cache.open_v):
            tensor.fill_(float("nan"))
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
            self.offloaded.write_chunk(layer, k, v, slots, torch.cat(opened), self.lengths)
            closed = torch.cat([own[: n // page] for own, n in zip(self.pages_of, self.lengths, strict=True)])
            self.plain.summaries.update(layer, self.k[layer], self.v[layer], closed)

    def step(self, active: list[int]) -> None:
        """One token for the requests in `active`; the others are padding. Compares outputs and summaries."""
        for b in active:
            self.lengths[b] += 1
        batch = len(self.lengths)
        index = torch.tensor([b + 1 if b in active else 0 for b in range(batch)])
        lengths = torch.tensor([n if b in active else 0 for b, n in enumerate(self.lengths)])
        self.plain.buffers.load(self.table, index, lengths)
        places = torch.tensor([int(self.table[b + 1, self.lengths[b] - 1]) for b in range(batch)])
        # SGLang's places are as many as there are requests, without what pads the batch.
        real = max(active, default=-1) + 1
        self.offloaded.load(self.table, index, lengths, index.int(), places[:real])
        for layer in range(LAYERS):
            q = self.normal(batch, GEOMETRY.query_heads, GEOMETRY.head_dim)
            k, v = (self.normal(batch, GEOMETRY.kv_heads, GEOMETRY.head_dim) for _ in range(2))
            self.k[layer, places[active]], self.v[layer, places[active]] = k[active], v[active]
            expected, out = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
            self.plain.attend(layer, q, self.k[layer], self.v[layer], scale=SCALE, out=expected)
            self.offloaded.decode(layer, q, k, v, scale=SCALE, out=out)
            assert torch.equal(out, expected)
            for b in active:
                closed = self.pages_of[b][: self.lengths[b] // GEOMETRY.page_size]
                assert self.offloaded.summaries.stale_pages(layer, self.k[layer], self.v[layer], closed) == 0
        assert torch.equal(self.plain.buffers.request_totals, self.offloaded.buffers.request_totals)
        assert torch.equal(self.plain.counters.kept_blocks, self.offloaded.counters.kept_blocks)


@pytest.mark.parametrize("slots", [0, 7, 200])
@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_offloaded_decode_equals_decode(slots: int, number: int) -> None:
    options = SparseDecodeOptions(**{"min_context": 64, "sink_tokens": 4, "window_tokens": 20, **OPTIONS[number]})
    pair = Pair(dataclasses.replace(options, audit_rate=0), slots, [300, 31, 64, 190])
    for number in range(40):
        pair.step([b for b in range(3 if number % 7 == 0 else 4) if b != number % 5])
    hits, misses, direct, _ = pair.offloaded.cache.totals.sum(0).tolist()
    assert misses > 0
    assert (hits > 0) == (slots > 0)
    if slots == 200:
        assert direct == 0


def test_turns_share_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are served in turns do not take each other's slots as if a step had passed."""
    monkeypatch.setattr(memory, "MAX_STEP_BYTES", 1)
    pair = Pair(SparseDecodeOptions(gamma=0.9, min_context=64, audit_rate=0), 30, [300, 150, 220])
    assert pair.offloaded.buffers.turn == 1
    for _ in range(5):
        pair.step([0, 1, 2])
    assert int(pair.offloaded.cache.epoch) == 64 + 5


@pytest.mark.parametrize("length", [100, 127])
def test_a_step_that_runs_on_writes_to_its_own_pages_after_its_row_changed_hands(length: int) -> None:
    """A request has ended, and the row is another's: what is cached in the other's pages stays as it is."""
    pair = Pair(SparseDecodeOptions(gamma=0.9, min_context=64, audit_rate=0), 30, [length, 300])
    offloaded, own = pair.offloaded, pair.table[1].clone()
    pair.table[1] = pair.table[2]
    others = pair.pages_of[1][: 300 // GEOMETRY.page_size].long()
    host = offloaded.host.blocks[:, others].clone()
    summaries = [tensor[others].clone() for tensor in offloaded.summaries[0]]
    place = own[length : length + 1].long()
    offloaded.load(pair.table, torch.tensor([1]), torch.tensor([length + 1]), torch.ones(1, dtype=torch.int32), place)
    for layer in range(LAYERS):
        q, k = pair.normal(1, GEOMETRY.query_heads, GEOMETRY.head_dim), pair.normal(1, 2, GEOMETRY.head_dim)
        offloaded.decode(layer, q, k, k, scale=SCALE, out=torch.empty_like(q))
        page, inner = int(place) // 32, int(place) % 32
        assert torch.equal(offloaded.host.blocks[layer, page, :, inner // 16, 0, inner % 16], k[0])
    assert torch.equal(offloaded.host.blocks[:, others], host)
    for tensor, before in zip(offloaded.summaries[0], summaries, strict=True):
        assert torch.equal(tensor[others], before)
