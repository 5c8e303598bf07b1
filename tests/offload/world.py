"""A server's life without a server: requests that prefill, decode, share prefixes and end, in a pool of few pages.

Beside the offloaded pools it keeps ordinary ones, to which every attention is compared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from sparse_kernels import pack_blocks, sparse_attention_reference, unpack_blocks
from sparse_kernels.slot_maps import NO_SLOT

from sglang_sparse.geometry import Geometry
from sglang_sparse.offload.pools import HostPool, HotCache
from sglang_sparse.offload.step import OffloadStep
from sglang_sparse.offload.streams import Streams
from sglang_sparse.open_pages import OpenPages

GEOMETRY = Geometry(kv_heads=2, group_size=2, head_dim=64, dtype=torch.float32, page_size=16, block_size=8)
LAYERS = 2
ROWS = 4


@dataclass
class Request:
    row: int
    pages: list[int]
    length: int


@dataclass
class World:
    """`slots` of each layer; `pages` of the pool, with the padding page."""

    slots: tuple[int, ...]
    pages: int = 9
    seed: int = 0
    streams: Streams | None = None
    installs: bool = False
    """Whether prefill puts its blocks into idle slots."""
    float8: bool = False
    """Whether the host pool rounds to float8."""
    requests: list[Request] = field(default_factory=list)
    tree: list[list[int]] = field(default_factory=list)
    """Cached prefixes: full pages."""

    def __post_init__(self) -> None:
        g = GEOMETRY
        self.host = HostPool(g, layers=LAYERS, pages=self.pages, device="cpu", float8=self.float8)
        self.cache = HotCache(g, pages=self.pages, slots=self.slots, rows=ROWS, device="cpu")
        # What was never written must not be read.
        for tensor in (self.cache.open_k, self.cache.open_v, *self.cache.hot):
            tensor.fill_(float("nan"))
        self.host.blocks.fill_(0xFF if self.float8 else float("nan"))
        self.k = torch.full((LAYERS, self.pages * g.page_size, g.kv_heads, g.head_dim), float("nan"))
        self.v = self.k.clone()
        self.max_pages = self.pages
        self.step = OffloadStep(
            self.cache,
            self.host,
            open_pages=OpenPages(g.page_size, ROWS, "cpu"),
            max_blocks=self.max_pages * g.blocks_per_page,
            streams=self.streams,
        )
        self.random = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)

    # --- pages -----------------------------------------------------------------------------------------------------

    @property
    def used(self) -> set[int]:
        return {0, *(page for owner in (*(r.pages for r in self.requests), *self.tree) for page in owner)}

    def allocate(self, count: int) -> list[int] | None:
        """Free pages, the one that was freed last first; prefixes go if there are too few."""
        while True:
            free = [page for page in range(self.pages) if page not in self.used]
            if len(free) >= count:
                self.random.shuffle(free)
                return free[:count]
            if not self.tree:
                return None
            self.tree.pop(0)

    # --- events ----------------------------------------------------------------------------------------------------

    def start(self, tokens: int, prefix: int | None = None) -> bool:
        """Prefills a request, with a cached prefix if there is one of that number; False if there is no room."""
        rows = set(range(ROWS)) - {request.row for request in self.requests}
        shared = self.tree[prefix % len(self.tree)] if prefix is not None and self.tree else []
        if not rows:
            return False
        request = Request(min(rows), list(shared), len(shared) * GEOMETRY.page_size + tokens)
        self.requests.append(request)
        pages = self.allocate(-(-tokens // GEOMETRY.page_size))
        if pages is None:
            self.requests.remove(request)
            return False
        request.pages += pages
        positions = torch.arange(len(shared) * GEOMETRY.page_size, request.length)
        # In one or two chunks; a chunk ends with a page.
        cut = self.random.randrange(0, len(positions), GEOMETRY.page_size)
        for chunk in (positions[:cut], positions[cut:]):
            last = int(chunk[-1]) if len(chunk) else 0
            opened = chunk // GEOMETRY.page_size == last // GEOMETRY.page_size
            inner = chunk % GEOMETRY.page_size
            places = torch.tensor(request.pages)[chunk // GEOMETRY.page_size] * GEOMETRY.page_size + inner
            open_slots = torch.where(opened, request.row * GEOMETRY.page_size + inner, -1).int()
            begun, full = (int(chunk[0]), last + 1) if len(chunk) else (0, 0)
            if self.installs:
                self.step.begin()
            for layer in range(LAYERS):
                k, v = self.new_kv(layer, places)
                self.step.write(layer, k, v, places, open_slots)
                for start, end in ((begun, full), (0, begun)) if self.installs else ():
                    own = request.pages[start // GEOMETRY.page_size : end // GEOMETRY.page_size][::-1]
                    self.step.install(layer, torch.tensor([2 * p + i for p in own for i in (1, 0)], dtype=torch.int32))
        return True

    def new_kv(self, layer: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Random keys and values of tokens at these places, negative ones for padded rows, noted in the plain pools."""
        shape = (len(places), GEOMETRY.kv_heads, GEOMETRY.head_dim)
        k, v = torch.randn(shape, generator=self.generator), torch.randn(shape, generator=self.generator)
        used = places >= 0
        self.k[layer, places[used]], self.v[layer, places[used]] = k[used], v[used]
        return k, v

    def end(self, index: int, keep: bool, unseen: int = 0) -> None:
        """Ends a request; its full pages may stay as a prefix. The last `unseen` tokens came from steps that ran on."""
        request = self.requests.pop(index % len(self.requests))
        full = max(0, request.length - unseen) // GEOMETRY.page_size
        if keep and full:
            self.tree.append(request.pages[:full])

    def decode(self, density: float, forecast: float | None = None, padding: int = 0) -> None:
        """One step of all requests for which there is room; compares every layer's attention with the plain pools'."""
        batch = []
        for request in list(self.requests):
            if request.length % GEOMETRY.page_size == 0:
                pages = self.allocate(1)
                if pages is None:
                    # Retracted: it may start anew later.
                    self.requests.remove(request)
                    continue
                request.pages += pages
            request.length += 1
            batch.append(request)
        count = min(ROWS, len(batch) + padding)
        page_table = torch.full((ROWS, self.max_pages), 2**30, dtype=torch.int32)
        lengths = torch.zeros(count, dtype=torch.int32)
        rows = torch.zeros(count, dtype=torch.int32)
        for b, request in enumerate(batch):
            page_table[b, : len(request.pages)] = torch.tensor(request.pages)
            lengths[b], rows[b] = request.length, request.row
        last = (lengths - 1).clamp_min(0).long()
        page = torch.where(page_table == 2**30, 0, page_table)[: len(lengths)].gather(
            1, (last // GEOMETRY.page_size)[:, None]
        )
        places = page[:, 0].long() * GEOMETRY.page_size + last % GEOMETRY.page_size
        self.step.open_pages.load(places, lengths, rows)
        self.step.begin()
        lists, counts = self.lists(lengths, density, must=True)
        expected = self.lists(lengths, forecast, must=False) if forecast is not None else None
        for layer in range(LAYERS):
            places = self.step.open_pages.pool_slots[:count].clone()
            self.step.store(layer, *self.new_kv(layer, places))
            self.step.fetch(layer, page_table, lengths, lists, counts)
            if expected is not None and layer + 1 < LAYERS:
                self.step.prefetch(layer + 1, page_table, lengths, *expected)
            self.check_attention(layer, page_table, lengths, lists, counts)
            lists, counts = self.lists(lengths, density, must=True)

    def lists(self, lengths: torch.Tensor, density: float, must: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Random ascending lists; `must` puts the blocks of the last page on them, as rules do."""
        g = GEOMETRY
        shape = (len(lengths), g.kv_heads, self.max_pages * g.blocks_per_page)
        index = torch.arange(shape[-1])
        blocks = -(-lengths[:, None, None] // g.block_size)
        chosen = torch.rand(shape, generator=self.generator) < density
        if must:
            chosen |= index >= ((lengths - 1) // g.page_size * g.blocks_per_page)[:, None, None]
        chosen &= index < blocks
        order = torch.where(chosen, index, shape[-1]).sort(-1).values
        return torch.where(order == shape[-1], 2**30, order).int(), chosen.sum(-1).int()

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_attention(self, layer, page_table, lengths, lists, counts) -> None:
        g, batch = GEOMETRY, len(lengths)
        q = torch.randn((batch, g.query_heads, g.head_dim), generator=self.generator)
        out, expected = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
        self.step.attend(layer, q, page_table, lengths, lists, counts, scale=0.125, out=out)
        sparse_attention_reference(
            q,
            *self.seen(layer),
            page_table,
            lengths,
            lists,
            counts,
            scale=0.125,
            page_size=g.page_size,
            block_size=g.block_size,
            out=expected,
        )
        assert torch.equal(out, expected)

    def as_blocks(self, layer: int) -> torch.Tensor:
        """The plain pools of a layer as the host pool gives them back, `[pages, Hkv, blocks_per_page, 2, block, D]`."""
        g = GEOMETRY
        both = torch.stack((self.k[layer], self.v[layer])).view(2, self.pages, g.blocks_per_page, g.block_size, 2, -1)
        blocks = both.permute(1, 4, 2, 0, 3, 5)
        return unpack_blocks(pack_blocks(blocks), g.block_size, g.dtype) if self.float8 else blocks

    def seen(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as attention sees them: those of open pages never left the GPU."""
        keys, values = self.as_blocks(layer).permute(3, 0, 2, 4, 1, 5).flatten(1, 3)
        for request in self.requests:
            page = request.pages[(request.length - 1) // GEOMETRY.page_size] * GEOMETRY.page_size
            own = slice(page, page + GEOMETRY.page_size)
            keys[own], values[own] = self.k[layer, own], self.v[layer, own]
        return keys, values

    def check(self) -> None:
        """Everything that has to hold between steps."""
        for layer in range(LAYERS):
            self.check_host(layer)
            self.check_slots(layer)

    def check_host(self, layer: int) -> None:
        """The host pool holds what the plain pools hold, in all live pages."""
        live = sorted(self.used - {0})
        held = self.host.decoded(self.host.blocks[layer][live])
        torch.testing.assert_close(held, self.as_blocks(layer)[live], rtol=0, atol=0, equal_nan=True)

    def check_slots(self, layer: int) -> None:
        """`slot_map` and `slot_block` agree, no block is in two slots, and a slot's bytes are its block's."""
        maps, per_page = self.cache.maps[layer], GEOMETRY.blocks_per_page
        host, hot = self.host.decoded(self.host.blocks[layer]), self.cache.hot[layer]
        assert (maps.slot_map >= NO_SLOT).all()
        for h in range(GEOMETRY.kv_heads):
            (blocks,) = (maps.slot_map[h] >= 0).nonzero(as_tuple=True)
            slots = maps.slot_map[h, blocks].long()
            assert len(slots.unique()) == len(slots)
            assert torch.equal(maps.slot_block[h, slots].long(), blocks)
            assert torch.equal(hot[h, slots], host[blocks // per_page, h, blocks % per_page])
