"""Layers of a host pool, caches of slots and open pages for paged cases. What must not be read is poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from factories import DEVICE, PagedCase, poisoned
from sparse_kernels import FetchList, SlotMaps, SlotSources, pack_blocks, unpack_blocks
from sparse_kernels.slot_maps import NO_SLOT


def host_layer(case: PagedCase) -> torch.Tensor:
    """The case's pool as one layer of a host pool, `[P, Hkv, blocks_per_page, 2, block, D]`; pinned on a GPU host."""
    both = torch.stack((case.k_pool, case.v_pool))
    shaped = both.view(2, case.num_pages, case.page_size // case.block_size, case.block_size, case.num_kv_heads, -1)
    host = shaped.permute(1, 4, 2, 0, 3, 5).contiguous().cpu()
    return host.pin_memory() if DEVICE == "cuda" else host


def as_float8(case: PagedCase) -> None:
    """Rounds the case's pools to what a host pool of float8 blocks gives back."""
    for pool in (case.k_pool, case.v_pool):
        both = torch.stack((pool, pool)).transpose(1, 2).cpu()
        packed = pack_blocks(both.transpose(0, 1))
        pool.copy_(unpack_blocks(packed, pool.shape[0], pool.dtype)[:, 0].transpose(0, 1))


@dataclass
class SlotCase:
    """A paged case whose blocks lie in a host pool, some of them in slots too."""

    case: PagedCase
    host: torch.Tensor
    hot: torch.Tensor
    maps: SlotMaps
    fetch: FetchList
    epoch: torch.Tensor
    sources: SlotSources

    def hold(self, slot_of: dict[tuple[int, int], int]) -> None:
        """Puts pool blocks into slots: `{(head, block): slot}`."""
        per_page = self.host.shape[2]
        for (h, block), slot in slot_of.items():
            self.maps.slot_map[h, block] = slot
            self.maps.slot_block[h, slot] = block
            held = self.host[block // per_page, h, block % per_page]
            if held.dtype == torch.uint8:
                held = unpack_blocks(held, self.case.block_size, self.hot.dtype)
            self.hot[h, slot] = held.to(self.hot.device)


def make_slot_case(
    case: PagedCase, slots: int, capacity: int | None = None, epoch: int = 100, float8: bool = False
) -> SlotCase:
    """An empty cache of `slots` a head, and open pages with what the requests' last pages hold."""
    host = host_layer(case)
    pages, heads, per_page, _, block, dim = host.shape
    if float8:
        host = pack_blocks(host)
        host = host.pin_memory() if DEVICE == "cuda" else host
    hot = poisoned(heads, slots, 2, block, dim).to(case.k_pool.dtype)
    maps = SlotMaps.create(heads, pages * per_page, slots, DEVICE)
    fetch = FetchList.create(heads, slots if capacity is None else capacity, DEVICE)
    rows = torch.randperm(case.batch + 2, generator=torch.Generator().manual_seed(1))[: case.batch + 1]
    open_shape = ((case.batch + 2) * case.page_size, heads, dim)
    open_k, open_v = (poisoned(*open_shape).to(case.k_pool.dtype) for _ in range(2))
    shared = {block // per_page for b in range(case.batch) for block in closed_blocks(case, b)}
    for b, length in enumerate(case.lengths):
        if length:
            first = (length - 1) // case.page_size * case.page_size
            at = int(rows[b]) * case.page_size
            opened = slice(at, at + length - first)
            open_k[opened], open_v[opened] = case.keys(b)[first:], case.values(b)[first:]
            page = int(case.page_table[b, first // case.page_size])
            # What is open must not be read from the pool.
            if page not in shared:
                host[page] = 0xFF if float8 else float("nan")
    sources = SlotSources(hot, maps.slot_map, host, open_k, open_v, rows.int().to(DEVICE))
    return SlotCase(case, host, hot, maps, fetch, torch.full((1,), epoch, dtype=torch.int32, device=DEVICE), sources)


def closed_blocks(case: PagedCase, b: int) -> list[int]:
    """Pool blocks of a request's pages before its last."""
    per_page = case.page_size // case.block_size
    pages = case.page_table[b, : max(case.lengths[b] - 1, 0) // case.page_size].tolist()
    return [page * per_page + i for page in pages for i in range(per_page)]


def hold_some(made: SlotCase, share: float, seed: int) -> None:
    """Random blocks in random slots."""
    rng = torch.Generator().manual_seed(seed)
    blocks = sorted({block for b in range(made.case.batch) for block in closed_blocks(made.case, b)})
    held = {}
    for h in range(made.case.num_kv_heads):
        chosen = [block for block in blocks if torch.rand((), generator=rng) < share][: made.maps.slots]
        places = torch.randperm(made.maps.slots, generator=rng).tolist()
        held |= {(h, block): slot for block, slot in zip(chosen, places, strict=False)}
    made.hold(held)


def check_maps(maps: SlotMaps) -> None:
    """No claim is left, and `slot_map` and `slot_block` agree: no block is in two slots, no slot holds two."""
    for h in range(maps.slot_map.shape[0]):
        of_block = maps.slot_map[h].cpu()
        assert (of_block >= NO_SLOT).all()
        (held,) = (of_block >= 0).nonzero(as_tuple=True)
        slots = of_block[held].long()
        assert len(slots.unique()) == len(slots)
        assert maps.slot_block[h].cpu()[slots].tolist() == held.tolist()
