"""Split keys on a GPU: captured graphs, replayed for steps of growing requests, beside keys as they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.split.decode import SplitDecode

pytestmark = pytest.mark.gpu

GEOMETRY = Geometry(kv_heads=4, group_size=4, head_dim=128, dtype=torch.bfloat16, page_size=64, block_size=16)
LAYERS, MAX_PAGES, SCALE = 3, 48, 128**-0.5
OPTIONS = {
    "coverage": SparseDecodeOptions(gamma=0.9, min_context=256, kv_format="split", dense_layers=(1,)),
    "top-delta": SparseDecodeOptions(
        rule="top-delta", delta=1.0, min_context=256, kv_format="split", sink_tokens=100, window_tokens=300
    ),
}
LENGTHS = [2500, 700, 63, 1920, 255]


class Captured:
    """Requests whose keys and values are all known beforehand, in an ordinary pool and split."""

    def __init__(self, options: SparseDecodeOptions) -> None:
        self.generator = torch.Generator("cuda").manual_seed(5)
        self.lengths, batch = list(LENGTHS), len(LENGTHS)
        pages = batch * MAX_PAGES + 1
        sizes = {"max_requests": batch, "max_pages": MAX_PAGES, "device": "cuda"}
        plain = dataclasses.replace(options, path="lists", kv_format="model")
        self.plain = DecodeStep(plain, GEOMETRY, layers=LAYERS, pages=pages, **sizes)
        page = GEOMETRY.page_size
        shape = (LAYERS, pages * page, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.k, self.v = self.normal(*shape), self.normal(*shape)
        values = [torch.full_like(each, float("nan")) for each in self.v]
        self.split = SplitDecode(options, GEOMETRY, values=values, rows=batch + 1, **sizes)
        order = (torch.randperm(pages - 1, generator=torch.Generator().manual_seed(0)) + 1).view(batch, MAX_PAGES)
        table = (order[:, :, None] * page + torch.arange(page)).flatten(1).int()
        self.table = torch.cat((torch.zeros_like(table[:1]), table)).cuda()
        self.order = order.cuda()
        for b, length in enumerate(self.lengths):
            places = self.table[b + 1, :length].long()
            position = torch.arange(length, device="cuda")
            opened = torch.where(position // page == (length - 1) // page, (b + 1) * page + position % page, -1).int()
            for layer in range(LAYERS):
                chunk = self.k[layer, places], self.v[layer, places]
                self.split.write_chunk(layer, *chunk, places, opened, [length])
                closed = self.order[b, : length // page]
                self.plain.summaries.update(layer, self.k[layer], self.v[layer], closed)
        heads = (batch, GEOMETRY.query_heads, GEOMETRY.head_dim)
        self.q = [torch.zeros(heads, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
        new = (batch, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.new_k, self.new_v = (torch.zeros((LAYERS, *new), dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.out = [torch.zeros_like(q) for q in self.q]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=self.generator)

    def load(self, active: list[int]) -> None:
        for b in active:
            self.lengths[b] += 1
        index = torch.tensor([b + 1 if b in active else 0 for b in range(len(self.lengths))], device="cuda")
        seq_lens = torch.tensor([n if b in active else 0 for b, n in enumerate(self.lengths)], device="cuda")
        self.plain.buffers.load(self.table, index, seq_lens)
        places = self.table[index, (seq_lens - 1).clamp_min(0)]
        self.split.load(self.table, index, seq_lens, index.int(), places)
        for b in active:
            place = int(self.table[b + 1, self.lengths[b] - 1])
            self.new_k[:, b], self.new_v[:, b] = self.k[:, place], self.v[:, place]

    def decode(self) -> None:
        for layer in range(LAYERS):
            new = self.new_k[layer], self.new_v[layer]
            self.split.decode(layer, self.q[layer], *new, scale=SCALE, out=self.out[layer])


@pytest.mark.parametrize("rule", OPTIONS)
def test_replays_equal_decode_over_keys_as_they_are(rule: str) -> None:
    """The same blocks, and outputs as near as keys are, in dense steps and others. Rule `top-delta` compares with
    scores of sinks and window, whose keys are rounded, so that a block at the threshold may be dropped or kept."""
    pair = Captured(OPTIONS[rule])
    rows = others = 0
    pair.load([])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for dense in (False, True):
            pair.split.dense = dense
            pair.decode()
    torch.cuda.current_stream().wait_stream(side)
    graphs = {}
    for dense in (False, True):
        graphs[dense] = torch.cuda.CUDAGraph()
        pair.split.dense = dense
        with torch.cuda.graph(graphs[dense]):
            pair.decode()
    for number in range(70):
        pair.plain.dense = number % 7 in (1, 2, 5)
        active = [b for b in range(len(LENGTHS)) if b != number % 6]
        pair.load(active)
        for q in pair.q:
            q.normal_(generator=pair.generator)
        for out in pair.out:
            out.fill_(float("nan"))
        graphs[pair.plain.dense].replay()
        for layer in range(LAYERS):
            expected = torch.full_like(pair.out[layer], float("nan"))
            pair.plain.attend(layer, pair.q[layer], pair.k[layer], pair.v[layer], scale=SCALE, out=expected)
            split_counts, counts = (
                step.buffers.block_counts[layer, : len(LENGTHS)] for step in (pair.split, pair.plain)
            )
            same = split_counts == counts
            rows, others = rows + same.numel(), others + int((~same).sum())
            got, wanted = (each.float().unflatten(1, (GEOMETRY.kv_heads, -1)) for each in (pair.out[layer], expected))
            torch.testing.assert_close(got[same], wanted[same], rtol=2e-2, atol=2e-2)
        if rule == "coverage":
            assert torch.equal(pair.split.buffers.block_counts, pair.plain.buffers.block_counts)
            assert torch.equal(pair.split.buffers.request_totals, pair.plain.buffers.request_totals)
    assert others <= 0.02 * rows
    for b, length in enumerate(pair.lengths):
        closed = pair.order[b, : length // GEOMETRY.page_size]
        for layer in range(LAYERS):
            assert pair.split.summaries.stale_pages(layer, pair.k[layer], pair.v[layer], closed) == 0
