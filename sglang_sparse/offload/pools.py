"""Where keys and values live under offload: the host pool, and on the GPU the slots and the open pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from sparse_kernels import FetchList, SlotMaps, SlotSources, block_gather, block_unpack, unpack_blocks
from sparse_kernels.host_block import PACKED, packed_bytes
from sparse_kernels.slot_assign import AGES
from sparse_kernels.slot_maps import TOTALS

from sglang_sparse.geometry import Geometry
from sglang_sparse.offload.pinned import CudaRegistrar, HostMemory
from sglang_sparse.offload.sizing import HOST_FLAG


class HostPool:
    """All keys and values in host memory, pinned for a GPU: `[layers, P, Hkv, blocks_per_page, 2, block, D]` in the
    model's dtype, or `[layers, P, Hkv, blocks_per_page, bytes]` uint8 of float8 blocks (`sparse_kernels.host_block`).

    Page 0 is SGLang's padding page. Raises OffloadError if the memory cannot be had.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        layers: int,
        pages: int,
        device: torch.device | str,
        float8: bool = False,
        flag: str = HOST_FLAG,
    ) -> None:
        g = self._geometry = geometry
        self.float8 = float8
        block = (packed_bytes(g.block_size, g.head_dim),) if float8 else (2, g.block_size, g.head_dim)
        dtype = PACKED if float8 else g.dtype
        shape = (layers, pages, g.kv_heads, g.blocks_per_page, *block)
        registrar = CudaRegistrar() if torch.device(device).type == "cuda" else None
        self.memory = HostMemory(math.prod(shape) * dtype.itemsize, flag=flag, registrar=registrar)
        self.blocks = self.memory.tensor(shape, dtype)

    def copy_blocks(
        self,
        layer: int,
        target: torch.Tensor,
        source_index: torch.Tensor,
        target_index: torch.Tensor,
        count: torch.Tensor,
    ) -> None:
        """`block_gather` from a layer into `target [m, 2, block, D]`; float8 blocks are decoded on their way."""
        copy = block_unpack if self.float8 else block_gather
        copy(self.blocks[layer].flatten(0, 2), target, source_index, target_index, count)

    def decoded(self, blocks: torch.Tensor) -> torch.Tensor:
        """A part of the pool, whole blocks, as `[..., 2, block, D]` in the model's dtype: for checks."""
        return unpack_blocks(blocks, self._geometry.block_size, self._geometry.dtype) if self.float8 else blocks

    def close(self) -> None:
        """Gives the memory back; the pool cannot be used any more."""
        del self.blocks
        self.memory.close()


class HotCache:
    """Slots for blocks of the host pool, one cache a layer and KV head, and the pages that requests are writing.

    Slots are never shared between layers or heads. Which blocks they hold changes on the device alone.

    Args:
        pages: pages of the host pool, the padding page included.
        slots: of each layer, for each of its KV heads; may be 0.
        rows: requests that may decode at once; a request keeps its row while it decodes.
    """

    def __init__(
        self, geometry: Geometry, *, pages: int, slots: Sequence[int], rows: int, device: torch.device | str
    ) -> None:
        g = self.geometry = geometry
        self.layers = len(slots)
        blocks = pages * g.blocks_per_page
        block = (2, g.block_size, g.head_dim)
        self.maps = [SlotMaps.create(g.kv_heads, blocks, count, device) for count in slots]
        self.hot = [torch.zeros((g.kv_heads, count, *block), dtype=g.dtype, device=device) for count in slots]
        open_shape = (self.layers, rows * g.page_size, g.kv_heads, g.head_dim)
        self.open_k = torch.zeros(open_shape, dtype=g.dtype, device=device)
        self.open_v = torch.zeros_like(self.open_k)
        self.demand = FetchList.create(g.kv_heads, max(slots), device)
        self.expected = FetchList.create(g.kv_heads, max(slots), device)
        self.installed = FetchList.create(g.kv_heads, max(slots), device)
        # Slots that were never used have stamp 0: they are the oldest from the first step on.
        self.epoch = torch.full((1,), AGES[0], dtype=torch.int32, device=device)
        self.totals = torch.zeros((self.layers, len(TOTALS)), dtype=torch.int64, device=device)
        """Hits, misses, direct reads and evictions of each layer since start."""

    def sources(self, layer: int, host: HostPool, open_rows: torch.Tensor) -> SlotSources:
        """Where attention of a layer finds keys and values; `open_rows [>=B]` int32."""
        return SlotSources(
            hot=self.hot[layer],
            slot_map=self.maps[layer].slot_map,
            host=host.blocks[layer],
            open_k=self.open_k[layer],
            open_v=self.open_v[layer],
            open_rows=open_rows,
        )
