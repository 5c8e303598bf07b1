"""One layer of an offloaded cache, for the benchmarks of its operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sparse_kernels import FetchList, SlotMaps, SlotSources, block_gather, slot_assign, slot_lookup

from .common import Batch, Suite

MAX_HOST_BYTES = 12 * 2**30
"""A suite whose pool is larger is left out: pinning it would take longer than measuring."""

Lists = tuple[torch.Tensor, torch.Tensor]


def fits(suite: Suite, name: str) -> bool:
    """Whether the suite's pool may be pinned; prints a line if not."""
    size = suite.k_pool.nbytes + suite.v_pool.nbytes
    if size > MAX_HOST_BYTES:
        print(f"{name}: a pool of {size / 2**30:.0f} GiB is not pinned: give smaller batches or contexts")
    return size <= MAX_HOST_BYTES


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


@dataclass(frozen=True)
class SlotLayer:
    """The suite's keys and values as a pinned host pool, and an empty cache of it."""

    suite: Suite
    host: torch.Tensor
    hot: torch.Tensor
    maps: SlotMaps
    fetch: FetchList
    epoch: torch.Tensor
    locations: torch.Tensor
    sources: SlotSources

    @classmethod
    def create(cls, suite: Suite, batch: Batch, slots: int) -> SlotLayer:
        """Of the pages that requests' last tokens are in, the open pages get what the pool holds."""
        heads, device = suite.num_kv_heads, suite.device
        shape = (2, suite.num_pages, suite.blocks_per_page, suite.block_size, heads, suite.head_dim)
        both = torch.stack((suite.k_pool, suite.v_pool)).view(shape)
        host = pinned(both.permute(1, 4, 2, 0, 3, 5).contiguous().cpu())
        hot = torch.zeros((heads, slots, *host.shape[3:]), dtype=suite.dtype, device=device)
        maps = SlotMaps.create(heads, suite.num_pages * suite.blocks_per_page, slots, device)
        last = ((batch.seq_lens - 1) // suite.page_size).long()
        pages = batch.page_table.gather(1, last[:, None])[:, 0].long()
        tokens = (pages[:, None] * suite.page_size + torch.arange(suite.page_size, device=device)).flatten()
        sources = SlotSources(
            hot=hot,
            slot_map=maps.slot_map,
            host=host,
            open_k=suite.k_pool[tokens],
            open_v=suite.v_pool[tokens],
            open_rows=torch.arange(batch.size, dtype=torch.int32, device=device),
        )
        capacity = batch.page_table.shape[1] * suite.blocks_per_page
        return cls(
            suite,
            host,
            hot,
            maps,
            FetchList.create(heads, slots, device),
            torch.full((1,), 64, dtype=torch.int32, device=device),
            torch.zeros((batch.size, heads, capacity), dtype=torch.int32, device=device),
            sources,
        )

    def look_up(self, batch: Batch, lists: Lists) -> None:
        slot_lookup(
            batch.page_table,
            batch.seq_lens,
            *lists,
            self.epoch,
            self.maps,
            self.fetch,
            lag=0,
            page_size=self.suite.page_size,
            block_size=self.suite.block_size,
            locations=self.locations,
        )

    def assign(self) -> None:
        slot_assign(self.epoch, self.maps, self.fetch, lag=0, blocks_per_page=self.suite.blocks_per_page)

    def gather(self) -> None:
        fetch = self.fetch
        block_gather(self.host.flatten(0, 2), self.hot.flatten(0, 1), fetch.source, fetch.target, fetch.copies)

    def step(self, batch: Batch, lists: Lists) -> None:
        """What a decode step does up to attention."""
        self.epoch.add_(1)
        self.look_up(batch, lists)
        self.assign()
        self.gather()


def changed(suite: Suite, batch: Batch, lists: Lists, share: float, seed: int) -> Lists:
    """Lists of which about `share` of the blocks are others than those of `lists`."""
    capacity = lists[0].shape[-1]
    index = torch.arange(capacity, device=suite.device)
    listed = torch.where(index < lists[1][..., None], lists[0], capacity).long()
    kept = torch.zeros((*lists[1].shape, capacity + 1), dtype=torch.bool, device=suite.device)
    kept = kept.scatter_(-1, listed, True)[..., :capacity]
    blocks = (batch.seq_lens + suite.block_size - 1) // suite.block_size
    rng = torch.Generator(suite.device).manual_seed(seed)
    drawn = torch.rand(kept.shape, generator=rng, device=suite.device)
    density = lists[1] / blocks[:, None]
    fresh = drawn < (share * density / (1 - density).clamp_min(0.01))[..., None]
    kept = torch.where(kept, drawn >= share, fresh) & (index < blocks[:, None, None])
    kept[..., 0] = True
    order = torch.where(kept, index, capacity).sort(-1).values
    return order.int(), kept.sum(-1, dtype=torch.int32)
