"""Prefill over prefixes in a host pool, beside dense attention over pools that hold everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_sparse import dense_attention
from sglang_sparse.dense_prefill import PrefillBatch
from sglang_sparse.geometry import Geometry
from sglang_sparse.offload.decode import OffloadedDecode
from sglang_sparse.offload.ordering import OrderError, OrderLog
from sglang_sparse.offload.prefill import StagedPrefill
from sglang_sparse.offload.streams import CudaStreams, Streams
from sglang_sparse.options import SparseDecodeOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
GEOMETRY = Geometry(kv_heads=2, group_size=3, head_dim=64, dtype=DTYPE, page_size=32, block_size=16)
LAYERS, PAGES, SCALE = 5, 40, 0.125


class Pools:
    """An offloaded server's pools and a staged prefill, and plain pools beside them."""

    def __init__(self, streams: Streams, staging_tokens: int = 256, slots: int = 9) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(2)
        self.decode = OffloadedDecode(
            SparseDecodeOptions(offload=True),
            GEOMETRY,
            pages=PAGES,
            slots=[slots] * LAYERS,
            rows=4,
            max_requests=4,
            max_pages=16,
            device=DEVICE,
            streams=streams,
        )
        write = self.decode.write_chunk
        self.prefill = StagedPrefill(
            GEOMETRY,
            self.decode.host,
            write,
            staging_tokens=staging_tokens,
            device=DEVICE,
            streams=streams,
            hot=self.decode.offload,
        )
        shape = (LAYERS, PAGES * GEOMETRY.page_size, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.k, self.v = (torch.full(shape, float("nan"), dtype=DTYPE, device=DEVICE) for _ in range(2))
        self.prefill._staging.fill_(float("nan"))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE).to(DTYPE)

    def run(self, pages: list[list[int]], prefixes: list[int], extends: list[int]) -> None:
        """One batch through all layers; compares each layer's output."""
        table = torch.full((len(pages), 16), 2**30, dtype=torch.int32)
        for r, own in enumerate(pages):
            table[r, : len(own)] = torch.tensor(own)
        rows = torch.arange(1, len(pages) + 1, device=DEVICE)
        batch = PrefillBatch(table.to(DEVICE), prefixes, extends, rows)
        places, opened = batch.places(GEOMETRY.page_size)
        self.prefill.begin(batch)
        for layer in range(LAYERS):
            q = self.normal(sum(extends), GEOMETRY.query_heads, GEOMETRY.head_dim)
            k, v = (self.normal(sum(extends), GEOMETRY.kv_heads, GEOMETRY.head_dim) for _ in range(2))
            self.k[layer, places], self.v[layer, places] = k, v
            out = torch.full_like(q, float("nan"))
            self.prefill.attend(layer, q, k, v, scale=SCALE, out=out)
            expected = self.expected(layer, q, pages, prefixes, extends)
            torch.testing.assert_close(
                out.float(), expected.float(), rtol=0.02, atol=2e-2 if DEVICE == "cuda" else 1e-5
            )
        self.prefill.end()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.check(pages, [p + e for p, e in zip(prefixes, extends, strict=True)], opened)

    def expected(self, layer, q, pages, prefixes, extends) -> torch.Tensor:
        page, first, parts = GEOMETRY.page_size, 0, []
        for own, prefix, extend in zip(pages, prefixes, extends, strict=True):
            slots = (torch.tensor(own)[:, None] * page + torch.arange(page)).flatten()[: prefix + extend].to(DEVICE)
            k, v = (pool[layer, slots].double().repeat_interleave(3, 1) for pool in (self.k, self.v))
            scores = torch.einsum("thd,shd->hts", q[first : first + extend].double(), k) * SCALE
            position = torch.arange(prefix + extend, device=DEVICE)
            scores.masked_fill_(position > position[prefix:, None], float("-inf"))
            parts.append(torch.einsum("hts,shd->thd", scores.softmax(-1), v))
            first += extend
        return torch.cat(parts)

    def check(self, pages: list[list[int]], lengths: list[int], opened: torch.Tensor) -> None:
        """Host pool, open pages and summaries hold what the plain pools do."""
        page, g = GEOMETRY.page_size, GEOMETRY
        for layer in range(LAYERS):
            both = torch.stack((self.k[layer], self.v[layer])).view(2, PAGES, g.blocks_per_page, 16, g.kv_heads, -1)
            for r, (own, length) in enumerate(zip(pages, lengths, strict=True)):
                full = own[: length // page]
                want = both[:, full].permute(1, 4, 2, 0, 3, 5).cpu()
                assert torch.equal(self.decode.host.blocks[layer][full], want)
                closed = torch.tensor(full, dtype=torch.int64, device=DEVICE)
                assert self.decode.summaries.stale_pages(layer, self.k[layer], self.v[layer], closed) == 0
                inner = (length - 1) % page + 1
                start = own[(length - 1) // page] * page
                row = slice((r + 1) * page, (r + 1) * page + inner)
                assert torch.equal(self.decode.cache.open_k[layer, row], self.k[layer, start : start + inner])
                assert torch.equal(self.decode.cache.open_v[layer, row], self.v[layer, start : start + inner])


def streams() -> Streams:
    return CudaStreams(DEVICE) if DEVICE == "cuda" else OrderLog()


def test_chunks_prefixes_and_batches() -> None:
    pools = Pools(streams())
    first = [3, 17, 9, 30, 5]
    pools.run([first], [0], [64])
    # The next chunk of the same request, and one without a prefix; both leave a page open.
    pools.run([first, [20, 21]], [64, 0], [71, 33])
    # Two requests on one prefix, one of them with a single token, and one that ends with its page.
    pools.run([[*first[:4], 11], [*first[:2], 12, 13], [14]], [128, 64, 0], [1, 40, 32])


def test_order_of_streams_over_several_batches_and_steps() -> None:
    """Loads, stores and decode steps in turn, without a wait by the host between."""
    log = OrderLog()
    pools = Pools(log)
    pages = [4, 7, 2, 1, 6, 8, 10]
    table = torch.zeros(2, 16 * GEOMETRY.page_size, dtype=torch.int32)
    rows = torch.ones(1, dtype=torch.int32, device=DEVICE)
    table[1, : 7 * 32] = (torch.tensor(pages, dtype=torch.int32)[:, None] * 32 + torch.arange(32)).flatten().int()
    for prefix in (0, 64):
        pools.run([pages], [prefix], [64])
        length = torch.tensor([prefix + 65])
        place = table[1, length - 1].to(DEVICE)
        pools.decode.load(table.to(DEVICE), torch.tensor([1]).to(DEVICE), length.to(DEVICE), rows, place)
        for layer in range(LAYERS):
            q = pools.normal(1, GEOMETRY.query_heads, 64)
            k, v = pools.normal(1, 2, 64), pools.normal(1, 2, 64)
            pools.decode.decode(layer, q, k, v, scale=SCALE, out=torch.empty_like(q))
    assert {"load", "store", "prefill", "attention"} <= {each.name for each in log.operations}
    assert {"forward", "load", "store"} == {each.stream for each in log.operations}


def test_a_layers_keys_are_given_back_once_they_are_stored() -> None:
    """Held for all layers, those of a large chunk are GiB that no budget knows of."""
    pools, held = Pools(streams()), []
    attend = pools.prefill.attend

    def counting(*args: Any, **kwargs: Any) -> None:
        attend(*args, **kwargs)
        held.append(len(pools.prefill._held))

    pools.prefill.attend = counting  # type: ignore[method-assign]
    pools.run([[3, 17]], [0], [64])
    assert held == [1, 2, 2, 2, 2]
    assert not pools.prefill._held


def test_a_prefix_is_copied_once() -> None:
    """Besides the staging there is room for one copy (`plan_sizes`)."""
    pools, own = Pools(Streams(), staging_tokens=320), list(range(1, 12))
    pools.run([own], [0], [320])
    bytes_of_prefix = 320 * GEOMETRY.kv_heads * GEOMETRY.kv_bytes
    made: list[int] = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and func in (
                torch.ops.aten.empty.memory_format,
                torch.ops.aten.clone.default,
                torch.ops.aten.cat.default,
            ):
                made.append(result.nbytes)
            return result

    batch = PrefillBatch(
        torch.tensor([own], dtype=torch.int32, device=DEVICE), [320], [1], torch.ones(1, device=DEVICE)
    )
    pools.prefill.begin(batch)
    q = pools.normal(1, GEOMETRY.query_heads, GEOMETRY.head_dim)
    k, v = (pools.normal(1, GEOMETRY.kv_heads, GEOMETRY.head_dim) for _ in range(2))
    before_attention: list[int] = []

    def attention(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        before_attention.extend(made)
        return q

    with pytest.MonkeyPatch.context() as patch, Allocations():
        # Its mask is a tensor that cannot be made under a dispatch mode.
        patch.setattr(dense_attention, "causal_lower_right", lambda *_: None)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        pools.prefill.attend(0, q, k, v, scale=SCALE, out=torch.empty_like(q))
    large = sum(each for each in before_attention if each >= bytes_of_prefix // 2)
    assert bytes_of_prefix <= large <= bytes_of_prefix * 1.01


def test_idle_slots_get_new_blocks_and_prefixes() -> None:
    """A cached prefix that is in no slot comes from the staging, new blocks from the host."""
    pools, own = Pools(streams(), slots=60), [4, 7, 2, 1, 6]
    pools.run([own], [0], [64])
    for maps in pools.decode.cache.maps:
        assert (maps.slot_map >= 0).sum() == 2 * 2 * GEOMETRY.kv_heads
        maps.slot_map.fill_(-1)
        maps.slot_block.fill_(-1)
    pools.run([own], [64], [70])
    blocks = {2 * page + i for page in own[:4] for i in range(2)}
    for layer, maps in enumerate(pools.decode.cache.maps):
        host, hot = pools.decode.host.blocks[layer], pools.decode.cache.hot[layer]
        for h in range(GEOMETRY.kv_heads):
            held = (maps.slot_map[h] >= 0).nonzero().flatten()
            assert set(held.tolist()) == blocks
            slots = maps.slot_map[h, held].long()
            assert torch.equal(hot[h, slots].cpu(), host[(held // 2).cpu(), h, (held % 2).cpu()])


class Forgetful(OrderLog):
    """Forgets to wait for some events."""

    def __init__(self, event: str) -> None:
        super().__init__()
        self.forgotten = event

    def wait(self, event: str) -> None:
        if not event.startswith(self.forgotten):
            super().wait(event)


@pytest.mark.parametrize("event", ["loaded", "stored", "installed", "read"])
def test_a_prefill_that_forgets_to_wait_is_found(event: str) -> None:
    pools = Pools(Forgetful(event))

    def batches() -> None:
        for prefix in (0, 64):
            pools.run([[1, 2, 3, 4, 5]], [prefix], [64])

    with pytest.raises(OrderError):
        batches()


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [([40], r"prefix lengths are \[40\]; needed: multiples of page_size=32"), ([96], "prefixes of 3 pages exceed the")],
)
def test_refuses(prefixes: list[int], message: str) -> None:
    pools = Pools(Streams(), staging_tokens=64)
    table = torch.arange(16, dtype=torch.int32)[None].to(DEVICE)
    with pytest.raises(ValueError, match=message):
        pools.prefill.begin(PrefillBatch(table, prefixes, [32], torch.ones(1, device=DEVICE)))
