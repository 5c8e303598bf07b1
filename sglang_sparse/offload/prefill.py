"""Prefill of requests whose prefixes are in host memory: layer by layer, prefixes stream in and new tokens stream out.

Of two layers the prefixes are on the GPU at a time: while one layer computes, the next one's prefix is on its way. New
keys and values are written through to the host beside the forward stream: nothing is left to be backed up later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from sparse_kernels import block_gather

from sglang_sparse.dense_prefill import PrefillBatch, attend_to_prefixes
from sglang_sparse.geometry import Geometry
from sglang_sparse.offload.pools import HostPool
from sglang_sparse.offload.streams import LOAD, STORE, Streams

LAYERS_STAGED = 2

Write = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]], None]
"""`OffloadedDecode.write_chunk`."""


class StagedPrefill:
    """Dense attention of prefill batches over prefixes in a host pool.

    For each batch: `begin`, then `attend` for every layer in order, then `end`. Nothing here is captured in a graph.

    Args:
        write: stores a layer's new tokens; called on the `store` stream.
        staging_tokens: prefix tokens of a batch, over all requests, that are on the GPU at a time in one layer.
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
    ) -> None:
        g = self._geometry = geometry
        self._host, self._write = host, write
        self.streams = streams or Streams()
        self.layers = host.blocks.shape[0]
        self.pages = staging_tokens // g.page_size
        shape = (LAYERS_STAGED, self.pages, *host.blocks.shape[2:])
        self._staging = torch.empty(shape, dtype=g.dtype, device=device)
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._batch: PrefillBatch | None = None
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of layers that may not be stored yet."""

    def begin(self, batch: PrefillBatch) -> None:
        """Announces a batch, and starts to load the prefixes of the first layers.

        Raises ValueError if a prefix ends within a page, or if the prefixes exceed the staging.
        """
        g, device = self._geometry, batch.page_table.device
        batch.check(g.page_size)
        counts = [prefix // g.page_size for prefix in batch.prefix_lens]
        if sum(counts) > self.pages:
            raise ValueError(f"prefixes of {sum(counts)} pages exceed the staging of {self.pages}")
        self._batch = batch
        self._pool_slots, self._open_slots = batch.places(g.page_size)
        pages = torch.cat([batch.page_table[r, :count] for r, count in enumerate(counts)])
        units = g.kv_heads * g.blocks_per_page
        inner = torch.arange(units, dtype=torch.int32, device=device)
        self._source = (pages[:, None].int() * units + inner).flatten()
        self._target = torch.arange(len(self._source), dtype=torch.int32, device=device)
        # What a stream still reads from the last batch was waited for in its `end`.
        self._count.fill_(len(self._source))
        self.streams.record("prefill")
        with self.streams.on(LOAD):
            self.streams.wait("prefill")
            for layer in range(min(LAYERS_STAGED, self.layers)):
                self._load(layer)

    def _load(self, layer: int) -> None:
        """Loads a layer's prefixes, on the current stream."""
        place = layer % LAYERS_STAGED
        self.streams.operation("load", reads=[("host", layer)], writes=[("staging", place)])
        if len(self._source):
            block_gather(
                self._host.blocks[layer].flatten(0, 2),
                self._staging[place].flatten(0, 2),
                self._source,
                self._target,
                self._count,
            )
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
        batch, g, place = self._batch, self._geometry, layer % LAYERS_STAGED
        self._release(layer - LAYERS_STAGED)
        self._held[layer] = k, v
        self.streams.wait(f"loaded {layer}")
        self.streams.record(f"made {layer}")
        with self.streams.on(STORE):
            self.streams.wait(f"made {layer}")
            self._write(layer, k, v, self._pool_slots, self._open_slots, batch.extend_lens)
            self.streams.record(f"stored {layer}")
        self.streams.operation("prefill", reads=[("staging", place)], writes=["prefill output"])
        starts = list(itertools.accumulate((prefix // g.page_size for prefix in batch.prefix_lens), initial=0))

        def copy_prefix(r: int, both: torch.Tensor) -> None:
            staged = self._staging[place, starts[r] : starts[r + 1]].permute(3, 1, 0, 2, 4, 5)
            both.unflatten(2, staged.shape[2:5]).copy_(staged)

        def make_room(shape: tuple[int, ...]) -> torch.Tensor:
            # The one copy of a prefix that `sizing` has room for.
            return torch.empty(shape, dtype=g.dtype, device=q.device)

        attend_to_prefixes(g, batch, q, k, v, copy_prefix=copy_prefix, make_room=make_room, scale=scale, out=out)
        if layer + LAYERS_STAGED < self.layers:
            self.streams.record(f"read {layer}")
            with self.streams.on(LOAD):
                self.streams.wait(f"read {layer}")
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
