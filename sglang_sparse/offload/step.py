"""One decode step under offload: store the new token, fetch what is missed, attend to slots.

For each layer, on the forward stream: `store`, then the block lists are chosen, `fetch`, if there is a forecast
`prefetch` of the next layer, `attend`. What attention reads is what the lists say; a forecast changes only what is
fetched when.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from sparse_kernels import (
    AttentionTail,
    AttentionWorkspace,
    FetchList,
    block_gather,
    block_store,
    slot_assign,
    slot_attention,
    slot_claim,
    slot_lookup,
)
from sparse_kernels.slot_assign import IDLE

from sglang_sparse.offload.pools import HostPool, HotCache
from sglang_sparse.offload.streams import PREFETCH, Streams
from sglang_sparse.open_pages import OpenPages

DEMAND, EXPECTED = 0, 1
"""Lags of stamps: what this step reads, and what it is expected to read."""


class OffloadStep:
    """Static buffers and order of operations of decode steps; the same on a CPU and in a CUDA graph.

    Args:
        open_pages: says where the new tokens of the step go, and has room for the largest batch.
        max_blocks: blocks of the longest request.
    """

    def __init__(
        self,
        cache: HotCache,
        host: HostPool,
        *,
        open_pages: OpenPages,
        max_blocks: int,
        streams: Streams | None = None,
        workspace: AttentionWorkspace | None = None,
    ) -> None:
        self.cache, self.host = cache, host
        self.streams = streams or Streams()
        self.workspace = workspace
        device = cache.epoch.device
        self.locations = torch.zeros(
            (len(open_pages.rows), cache.geometry.kv_heads, max_blocks), dtype=torch.int32, device=device
        )
        self.open_pages = open_pages

    def begin(self) -> None:
        """The step's first operation, inside the graph: its epoch. A prefill batch that installs has one, too."""
        self.streams.operation("epoch", reads=(), writes=["epoch"])
        self.cache.epoch.add_(1)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes the step's new keys and values, `[B, Hkv, D]`, to open pages and through to the host."""
        # A prefetch of this layer uses the maps that are written here.
        self.streams.wait(f"prefetched {layer}")
        batch = len(k)
        self.write(layer, k, v, self.open_pages.pool_slots[:batch], self.open_pages.slots[:batch])

    def write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, pool_slots: torch.Tensor, open_slots: torch.Tensor
    ) -> None:
        """`block_store` of any tokens, such as a chunk of prefill."""
        self.streams.operation("store", reads=(), writes=[("host", layer), ("open", layer), ("maps", layer)])
        block_store(
            k,
            v,
            pool_slots,
            open_slots,
            self.cache.maps[layer].slot_map,
            host=self.host.blocks[layer],
            open_k=self.cache.open_k[layer],
            open_v=self.cache.open_v[layer],
            page_size=self.cache.geometry.page_size,
            block_size=self.cache.geometry.block_size,
        )

    def fetch(
        self,
        layer: int,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        block_lists: torch.Tensor,
        block_counts: torch.Tensor,
    ) -> None:
        """Brings listed blocks that are in no slot into slots, as far as there are slots that this step does not use.

        Arguments as in `slot_lookup`; `[B]` lengths.
        """
        self._bring(layer, page_table, seq_lens, block_lists, block_counts, self.cache.demand, DEMAND)

    def prefetch(
        self,
        layer: int,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        block_lists: torch.Tensor,
        block_counts: torch.Tensor,
    ) -> None:
        """Brings blocks that a later layer of this step is expected to read, beside the forward stream.

        Takes only slots that neither the last step nor another forecast for this step has used. The lists must stay as
        they are until the layer's `store`.
        """
        with self.beside(layer):
            self.bring_expected(layer, page_table, seq_lens, block_lists, block_counts)

    def bring_expected(
        self,
        layer: int,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        block_lists: torch.Tensor,
        block_counts: torch.Tensor,
    ) -> None:
        """`prefetch` for who is already `beside`."""
        self._bring(layer, page_table, seq_lens, block_lists, block_counts, self.cache.expected, EXPECTED)

    @contextlib.contextmanager
    def beside(self, layer: int) -> Iterator[None]:
        """What is inside runs beside the forward stream, after all that came before; the `store` of `layer` waits."""
        self.streams.record("fork")
        with self.streams.on(PREFETCH):
            self.streams.wait("fork")
            yield
            self.streams.record(f"prefetched {layer}")

    def install(
        self,
        layer: int,
        blocks: torch.Tensor,
        source: torch.Tensor | None = None,
        source_pages: torch.Tensor | None = None,
    ) -> None:
        """Brings blocks into slots that no step has used lately, and only there; on the current stream, in no graph.

        What it brings, or finds in slots, stays for this epoch; after that it gives way first until a step reads it.

        Args:
            blocks: `[n]` int32, pool blocks, those that matter most first.
            source: `[pages, Hkv, blocks_per_page, 2, block, D]` on the GPU, which holds them too; None for the host.
            source_pages: `[P]` int32, where the source has each page.
        """
        cache, g = self.cache, self.cache.geometry
        maps, fetch = cache.maps[layer], cache.installed
        if not maps.slots or not len(blocks):
            return
        work = ("list", IDLE)
        self.streams.operation("claim", reads=["epoch"], writes=[("maps", layer), work])
        slot_claim(blocks, cache.epoch, maps, fetch, lag=IDLE)
        slot_assign(cache.epoch, maps, fetch, lag=IDLE, blocks_per_page=g.blocks_per_page, source_pages=source_pages)
        slots = cache.hot[layer].flatten(0, 1)
        self.streams.operation("gather", reads=[("host", layer), work], writes=[("hot", layer)])
        if source is None:
            self.host.copy_blocks(layer, slots, fetch.source, fetch.target, fetch.copies)
        else:
            block_gather(source.flatten(0, 2), slots, fetch.source, fetch.target, fetch.copies)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        block_lists: torch.Tensor,
        block_counts: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor,
        tail: AttentionTail | None = None,
        lse: torch.Tensor | None = None,
        open_rows: torch.Tensor | None = None,
    ) -> None:
        """Attention over the blocks that `fetch` of the same lists found; arguments as in `sparse_attention`.

        `open_rows` are those of the requests of `q`, if they are not the first of the step.
        """
        g, batch = self.cache.geometry, len(q)
        self.streams.operation(
            "attention",
            reads=[(name, layer) for name in ("hot", "maps", "host", "open")] + ["locations"],
            writes=["workspace"],
        )
        slot_attention(
            q,
            self.cache.sources(layer, self.host, self.open_pages.rows if open_rows is None else open_rows),
            self.locations[:batch],
            page_table,
            seq_lens,
            block_lists,
            block_counts,
            scale=scale,
            page_size=g.page_size,
            block_size=g.block_size,
            out=out,
            workspace=self.workspace,
            tail=tail,
            lse=lse,
        )

    def _bring(
        self,
        layer: int,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        block_lists: torch.Tensor,
        block_counts: torch.Tensor,
        fetch: FetchList,
        lag: int,
    ) -> None:
        cache, g = self.cache, self.cache.geometry
        maps = cache.maps[layer]
        totals = cache.totals[layer] if lag == DEMAND else None
        work = ("list", lag)
        found = ["locations"] if lag == DEMAND else []
        lists = [] if lag == DEMAND else ["expected lists"]
        self.streams.operation("lookup", reads=["epoch", *lists], writes=[("maps", layer), work, *found])
        slot_lookup(
            page_table,
            seq_lens,
            block_lists,
            block_counts,
            cache.epoch,
            maps,
            fetch,
            lag=lag,
            page_size=g.page_size,
            block_size=g.block_size,
            locations=self.locations[: len(seq_lens)] if lag == DEMAND else None,
            totals=totals,
        )
        self.streams.operation("assign", reads=["epoch"], writes=[("maps", layer), work])
        slot_assign(cache.epoch, maps, fetch, lag=lag, blocks_per_page=g.blocks_per_page, totals=totals)
        if not maps.slots:
            return
        self.streams.operation("gather", reads=[("host", layer), work], writes=[("hot", layer)])
        self.host.copy_blocks(layer, cache.hot[layer].flatten(0, 1), fetch.source, fetch.target, fetch.copies)
