"""Which block of a host pool is in which slot of a cache on the GPU, for one layer; and what is to be fetched.

The unit is a block of one KV head: `[2, block_size, D]`, keys before values. A *pool block* is
`page * blocks_per_page + i`, the i-th block of a physical page; every head has slots and maps of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._checks import check_contiguous, check_dtype, check_shape

NO_SLOT = -1
"""In `slot_map`: the block is in no slot. In `slot_block`: the slot never held a block."""

CLAIMED = -2
"""In `slot_map`, between a lookup and its assign: a row has put the block on the list of misses."""

OPEN = -(2**30)
"""In `locations`: `OPEN - i` is the i-th block of the request's last page, which is not in the cache."""

MAX_POOL_BLOCKS = 2**30 - 1

TOTALS = ("hits", "misses", "direct", "evictions")
"""What a row of `totals` counts: blocks found, blocks missed, missed blocks without a slot, blocks put out."""


@dataclass(frozen=True)
class SlotMaps:
    """One layer's maps. A slot `s` of head `h` holds block `b` exactly if `slot_map[h, b] == s`; then
    `slot_block[h, s] == b`. The reverse does not hold: a page that is written anew clears `slot_map` alone.

    Attributes:
        slot_map: `[Hkv, pool blocks]` int32.
        slot_block: `[Hkv, S]` int32.
        slot_stamp: `[Hkv, S]` int32: epoch in which the slot was last used.
        hand: `[Hkv]` int32: the slot that the clock looks at next.
    """

    slot_map: torch.Tensor
    slot_block: torch.Tensor
    slot_stamp: torch.Tensor
    hand: torch.Tensor

    @classmethod
    def create(cls, kv_heads: int, pool_blocks: int, slots: int, device: torch.device | str) -> SlotMaps:
        """Maps of an empty cache; `slots` may be 0."""

        def filled(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        return cls(
            slot_map=filled(NO_SLOT, kv_heads, pool_blocks),
            slot_block=filled(NO_SLOT, kv_heads, slots),
            slot_stamp=filled(0, kv_heads, slots),
            hand=filled(0, kv_heads),
        )

    @property
    def slots(self) -> int:
        return self.slot_block.shape[1]

    def check(self, kv_heads: int, blocks_per_page: int) -> None:
        """Raises ValueError unless the maps fit together and a pool of `kv_heads`."""
        check_shape("maps.slot_map", self.slot_map, kv_heads, None)
        if self.slot_map.shape[1] % blocks_per_page or self.slot_map.shape[1] > MAX_POOL_BLOCKS:
            raise ValueError(
                f"maps.slot_map has {self.slot_map.shape[1]} blocks; needed: a multiple of {blocks_per_page} up to "
                f"{MAX_POOL_BLOCKS}"
            )
        check_shape("maps.slot_block", self.slot_block, kv_heads, None)
        check_shape("maps.slot_stamp", self.slot_stamp, kv_heads, self.slots)
        check_shape("maps.hand", self.hand, kv_heads)
        for name, tensor in vars(self).items():
            check_dtype(f"maps.{name}", tensor, torch.int32)
            check_contiguous(f"maps.{name}", tensor)


@dataclass(frozen=True)
class FetchList:
    """What one lookup missed, and what its assign makes of it: copies from the host pool to slots.

    One list serves all layers in turn, on one stream; demand and prefetch have lists of their own.

    Attributes:
        blocks: `[Hkv, M]` int32: missed pool blocks of each head. More misses than `M` get no slot.
        counts: `[Hkv]` int32: misses of each head, above `M` too; 0 outside lookup and assign.
        source: `[Hkv * M]` int32: a block's place in the host pool `[P, Hkv, blocks_per_page]`, flat.
        target: `[Hkv * M]` int32: its place in the slots `[Hkv, S]`, flat.
        copies: `[1]` int32: how many of them there are.
    """

    blocks: torch.Tensor
    counts: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    copies: torch.Tensor

    @classmethod
    def create(cls, kv_heads: int, capacity: int, device: torch.device | str) -> FetchList:
        """An empty list of up to `capacity` misses a head."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            blocks=zeros(kv_heads, capacity),
            counts=zeros(kv_heads),
            source=zeros(kv_heads * capacity),
            target=zeros(kv_heads * capacity),
            copies=zeros(1),
        )

    @property
    def capacity(self) -> int:
        return self.blocks.shape[1]

    def check(self, kv_heads: int) -> None:
        """Raises ValueError unless the tensors fit together."""
        check_shape("fetch.blocks", self.blocks, kv_heads, None)
        check_shape("fetch.counts", self.counts, kv_heads)
        check_shape("fetch.source", self.source, kv_heads * self.capacity)
        check_shape("fetch.target", self.target, kv_heads * self.capacity)
        check_shape("fetch.copies", self.copies, 1)
        for name, tensor in vars(self).items():
            check_dtype(f"fetch.{name}", tensor, torch.int32)
            check_contiguous(f"fetch.{name}", tensor)


def check_epoch(epoch: torch.Tensor) -> None:
    """Raises ValueError unless `epoch` is `[1]` int32."""
    check_shape("epoch", epoch, 1)
    check_dtype("epoch", epoch, torch.int32)


def check_totals(totals: torch.Tensor | None) -> None:
    """Raises ValueError unless `totals` is None or `[4]` int64."""
    if totals is not None:
        check_shape("totals", totals, len(TOTALS))
        check_dtype("totals", totals, torch.int64)
        check_contiguous("totals", totals)
