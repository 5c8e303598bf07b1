"""Prefill of requests whose prefixes are in host memory: layer by layer, prefixes stream in and new tokens stream out.

Of two layers the prefixes are on the GPU at a time: while one layer computes, the next one's prefix is on its way. New
keys and values are written through to the host beside the forward stream: nothing is left to be backed up later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_sparse.geometry import Geometry
from sglang_sparse.offload.pools import HostPool
from sglang_sparse.offload.prefill_attention import PrefillAttention, TorchAttention
from sglang_sparse.offload.step import OffloadStep
from sglang_sparse.offload.streams import LOAD, STORE, Streams

LAYERS_STAGED = 2

Write = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]], None]
"""`OffloadedDecode.write_chunk`."""


@dataclass(frozen=True)
class PrefillBatch:
    """The requests of one prefill, their new tokens one after another."""

    page_table: torch.Tensor
    """`[R, max_pages]` int32, pages of each request, prefix and new tokens."""
    prefix_lens: list[int]
    """Tokens in the host pool already; whole pages."""
    extend_lens: list[int]
    """New tokens; sum `T`."""
    rows: torch.Tensor
    """`[R]`, rows of the open pages."""

    def places(self, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`pool_slots [T]` int64 and `open_slots [T]` int32 of the new tokens, as `block_store` takes them."""
        device = self.page_table.device
        pool, opened = [], []
        for r, (prefix, extend, row) in enumerate(zip(self.prefix_lens, self.extend_lens, self.rows, strict=True)):
            position = torch.arange(prefix, prefix + extend, device=device)
            page, inner = position // page_size, position % page_size
            pool.append(self.page_table[r].long()[page] * page_size + inner)
            is_open = page == (prefix + extend - 1) // page_size
            opened.append(torch.where(is_open, row * page_size + inner, -1).int())
        return torch.cat(pool), torch.cat(opened)


class StagedPrefill:
    """Dense attention of prefill batches over prefixes in a host pool.

    For each batch: `begin`, then `attend` for every layer in order, then `end`. Nothing here is captured in a graph.

    Args:
        write: stores a layer's new tokens; called on the `store` stream.
        staging_tokens: prefix tokens of a batch, over all requests, that are on the GPU at a time in one layer.
        attention: what attends; None for torch.
        hot: whose slots get blocks of the batch as far as they are not in use, so that its first steps miss less; on
            the `store` stream. None for nothing.
    """

    def __init__(
        self,
        geometry: Geometry,
        host: HostPool,
        write: Write,
        *,
        staging_tokens: int,
        device: torch.device | str,
        streams: Streams | None = None,
        attention: PrefillAttention | None = None,
        hot: OffloadStep | None = None,
    ) -> None:
        self._hot = hot
        g = self._geometry = geometry
        self.attention = attention or TorchAttention(geometry)
        self._host, self._write = host, write
        self.streams = streams or Streams()
        self.layers = host.blocks.shape[0]
        self.pages = staging_tokens // g.page_size
        shape = (LAYERS_STAGED, self.pages, g.kv_heads, g.blocks_per_page, 2, g.block_size, g.head_dim)
        self._staging = torch.empty(shape, dtype=g.dtype, device=device)
        self._staged_pages = torch.zeros(host.blocks.shape[1], dtype=torch.int32, device=device)
        """Where a page of the pool is in the staging, if it is one of the batch's prefixes."""
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._batch: PrefillBatch | None = None
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of layers that may not be stored yet."""

    def begin(self, batch: PrefillBatch) -> None:
        """Announces a batch, and starts to load the prefixes of the first layers.

        Raises ValueError if a prefix ends within a page, or if the prefixes exceed the staging.
        """
        g, device = self._geometry, batch.page_table.device
        if any(prefix % g.page_size for prefix in batch.prefix_lens):
            raise ValueError(f"prefix lengths are {batch.prefix_lens}; needed: multiples of page_size={g.page_size}")
        counts = [prefix // g.page_size for prefix in batch.prefix_lens]
        if sum(counts) > self.pages:
            raise ValueError(f"prefixes of {sum(counts)} pages exceed the staging of {self.pages}")
        self._batch = batch
        self._pool_slots, self._open_slots = batch.places(g.page_size)
        self.attention.begin(batch.prefix_lens, batch.extend_lens, device)
        pages = torch.cat([batch.page_table[r, :count] for r, count in enumerate(counts)])
        units = g.kv_heads * g.blocks_per_page
        inner = torch.arange(units, dtype=torch.int32, device=device)
        self._source = (pages[:, None].int() * units + inner).flatten()
        self._target = torch.arange(len(self._source), dtype=torch.int32, device=device)
        self._staged_pages[pages.long()] = torch.arange(len(pages), dtype=torch.int32, device=device)
        self._prefix_blocks = self._latest_first(batch, counts, [0] * len(counts))
        ends = [(p + e) // g.page_size for p, e in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        self._new_blocks = self._latest_first(batch, ends, counts)
        # What a stream still reads from the last batch was waited for in its `end`.
        self._count.fill_(len(self._source))
        if self._hot is not None:
            self._hot.begin()
        self.streams.record("prefill")
        with self.streams.on(LOAD):
            self.streams.wait("prefill")
            for layer in range(min(LAYERS_STAGED, self.layers)):
                self._load(layer)

    def _latest_first(self, batch: PrefillBatch, ends: list[int], starts: list[int]) -> torch.Tensor:
        """`[n]` int32, the pool blocks of each request's pages from `starts` to `ends`, its last one first."""
        per_page, table = self._geometry.blocks_per_page, batch.page_table
        pages = torch.cat(
            [table[r, start:end].flip(0) for r, (start, end) in enumerate(zip(starts, ends, strict=True))]
        )
        inner = torch.arange(per_page - 1, -1, -1, dtype=torch.int32, device=table.device)
        return (pages[:, None].int() * per_page + inner).flatten()

    def _install_blocks(self, layer: int) -> None:
        """Brings the batch's blocks of a layer into idle slots, on the current stream: new ones before prefixes, which
        are copied from the staging, where the layer's are by now."""
        if self._hot is None:
            return
        self._hot.install(layer, self._new_blocks)
        if len(self._prefix_blocks):
            place = layer % LAYERS_STAGED
            self.streams.operation("install", reads=[("staging", place)], writes=())
            self._hot.install(layer, self._prefix_blocks, self._staging[place], self._staged_pages)

    def _load(self, layer: int) -> None:
        """Loads a layer's prefixes, on the current stream."""
        place = layer % LAYERS_STAGED
        self.streams.operation("load", reads=[("host", layer)], writes=[("staging", place)])
        if len(self._source):
            staging = self._staging[place].flatten(0, 2)
            self._host.copy_blocks(layer, staging, self._source, self._target, self._count)
        self.streams.record(f"loaded {layer}")

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        """Causal attention of the new tokens over prefixes and themselves, and storage of their keys and values.

        Args:
            q: `[T, Hq, D]`.
            k, v: `[T, Hkv, D]`. They are held for a layer more, or until `end`: they are views of all that a layer's
                projection made, which would be several GiB for all layers of a large chunk.
            out: `[T, Hq, D]`, written.
        """
        assert self._batch is not None
        place = layer % LAYERS_STAGED
        self._release(layer - LAYERS_STAGED)
        self._held[layer] = k, v
        self.streams.wait(f"loaded {layer}")
        self.streams.record(f"made {layer}")
        with self.streams.on(STORE):
            self.streams.wait(f"made {layer}")
            self._write(layer, k, v, self._pool_slots, self._open_slots, self._batch.extend_lens)
            self._install_blocks(layer)
            self.streams.record(f"stored {layer}")
            self.streams.record(f"installed {layer}")
        self.streams.operation("prefill", reads=[("staging", place)], writes=["prefill output"])
        self.attention.attend(q, k, v, self._staging[place], scale=scale, out=out)
        if layer + LAYERS_STAGED < self.layers:
            self.streams.record(f"read {layer}")
            with self.streams.on(LOAD):
                self.streams.wait(f"read {layer}")
                self.streams.wait(f"installed {layer}")
                self._load(layer + LAYERS_STAGED)

    def end(self) -> None:
        """After the last layer: what follows on the forward stream sees all that was stored."""
        for layer in list(self._held):
            self._release(layer)
        self._batch = None

    def _release(self, layer: int) -> None:
        """Gives a layer's new keys and values back: what follows on the forward stream comes after they are stored."""
        if layer in self._held:
            self.streams.wait(f"stored {layer}")
            del self._held[layer]
