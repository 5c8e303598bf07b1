"""Offloaded decode on a GPU: a captured graph, replayed for steps of growing requests, beside decode from one pool."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.offload.decode import OffloadedDecode
from sglang_sparse.offload.streams import CudaStreams
from sglang_sparse.options import SparseDecodeOptions

pytestmark = pytest.mark.gpu

GEOMETRY = Geometry(kv_heads=4, group_size=4, head_dim=128, dtype=torch.bfloat16, page_size=64, block_size=16)
LAYERS, MAX_PAGES, SCALE = 3, 48, 128**-0.5
OPTIONS = SparseDecodeOptions(gamma=0.9, min_context=256, audit_rate=0)
LENGTHS = [2500, 700, 63, 1920, 255]


class Captured:
    """Requests whose keys and values are all known beforehand, in an ordinary pool and offloaded."""

    def __init__(self, slots: int, forecast: bool) -> None:
        self.generator = torch.Generator("cuda").manual_seed(5)
        self.lengths, self.forecast, batch = list(LENGTHS), forecast, len(LENGTHS)
        pages = batch * MAX_PAGES + 1
        sizes = {"max_requests": batch, "max_pages": MAX_PAGES, "device": "cuda"}
        self.plain = DecodeStep(OPTIONS, GEOMETRY, layers=LAYERS, pages=pages, **sizes)
        self.offloaded = OffloadedDecode(
            dataclasses.replace(OPTIONS, offload=True),
            GEOMETRY,
            pages=pages,
            slots=[slots] * LAYERS,
            rows=batch + 1,
            streams=CudaStreams("cuda") if forecast else None,
            **sizes,
        )
        page = GEOMETRY.page_size
        shape = (LAYERS, pages * page, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.k, self.v = self.normal(*shape), self.normal(*shape)
        order = (torch.randperm(pages - 1, generator=torch.Generator().manual_seed(0)) + 1).view(batch, MAX_PAGES)
        table = (order[:, :, None] * page + torch.arange(page)).flatten(1).int()
        self.table = torch.cat((torch.zeros_like(table[:1]), table)).cuda()
        for b, length in enumerate(self.lengths):
            places = self.table[b + 1, :length].long()
            position = torch.arange(length, device="cuda")
            opened = torch.where(position // page == (length - 1) // page, (b + 1) * page + position % page, -1).int()
            for layer in range(LAYERS):
                chunk = self.k[layer, places], self.v[layer, places]
                self.offloaded.write_chunk(layer, *chunk, places, opened, [length])
                closed = order[b, : length // page].cuda()
                self.plain.summaries.update(layer, self.k[layer], self.v[layer], closed)
        heads = (batch, GEOMETRY.query_heads, GEOMETRY.head_dim)
        self.q = [torch.zeros(heads, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
        new = (batch, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.new_k, self.new_v = (torch.zeros((LAYERS, *new), dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.out = [torch.zeros_like(q) for q in self.q]
        self.guess = torch.zeros((batch, GEOMETRY.kv_heads, 32), dtype=torch.int32, device="cuda")
        self.guess_counts = torch.zeros((batch, GEOMETRY.kv_heads), dtype=torch.int32, device="cuda")

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=self.generator)

    def load(self, active: list[int]) -> None:
        for b in active:
            self.lengths[b] += 1
        index = torch.tensor([b + 1 if b in active else 0 for b in range(len(self.lengths))], device="cuda")
        lengths = [n if b in active else 0 for b, n in enumerate(self.lengths)]
        seq_lens = torch.tensor(lengths, device="cuda")
        self.plain.buffers.load(self.table, index, seq_lens)
        places = self.table[index, (seq_lens - 1).clamp_min(0)]
        self.offloaded.load(self.table, index, seq_lens, index.int(), places)
        for b in active:
            place = int(self.table[b + 1, self.lengths[b] - 1])
            self.new_k[:, b], self.new_v[:, b] = self.k[:, place], self.v[:, place]
        # Any blocks: a forecast may be wrong, but not beyond the request.
        for b, length in enumerate(lengths):
            count = min(32, -(-length // GEOMETRY.block_size))
            order = torch.randperm(max(count, -(-length // GEOMETRY.block_size)))[:count]
            self.guess[b, :, :count] = order.int().cuda()
            self.guess_counts[b] = count

    def decode(self) -> None:
        step = self.offloaded
        for layer in range(LAYERS):
            step.decode(layer, self.q[layer], self.new_k[layer], self.new_v[layer], scale=SCALE, out=self.out[layer])
            if self.forecast and layer + 1 < LAYERS:
                step.offload.prefetch(
                    layer + 1, step.buffers.page_table, step.buffers.seq_lens, self.guess, self.guess_counts
                )


@pytest.mark.parametrize("slots", [0, 40, 600])
@pytest.mark.parametrize("forecast", [False, True])
def test_replays_equal_decode_from_one_pool(slots: int, forecast: bool) -> None:
    pair = Captured(slots, forecast)
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
        active = [b for b in range(len(LENGTHS)) if b != number % 6]
        pair.load(active)
        for q in pair.q:
            q.normal_(generator=pair.generator)
        for out in pair.out:
            out.fill_(float("nan"))
        graph.replay()
        for layer in range(LAYERS):
            expected = torch.full_like(pair.out[layer], float("nan"))
            pair.plain.attend(layer, pair.q[layer], pair.k[layer], pair.v[layer], scale=SCALE, out=expected)
            torch.testing.assert_close(pair.out[layer].float(), expected.float(), rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(
                pair.offloaded.buffers.block_counts[layer], pair.plain.buffers.block_counts[layer], rtol=0, atol=0
            )
    hits, misses, direct, _ = pair.offloaded.cache.totals.sum(0).tolist()
    assert misses > 0
    assert (hits > 0) == (slots > 0)
    if slots == 600:
        assert direct == 0
    for layer, maps in enumerate(pair.offloaded.cache.maps):
        for h in range(GEOMETRY.kv_heads):
            (blocks,) = (maps.slot_map[h] >= 0).nonzero(as_tuple=True)
            held = maps.slot_map[h, blocks].long()
            assert torch.equal(maps.slot_block[h, held].long(), blocks)
            host = pair.offloaded.host.blocks[layer][(blocks // 4).cpu(), h, (blocks % 4).cpu()]
            assert torch.equal(pair.offloaded.cache.hot[layer][h, held].cpu(), host)
