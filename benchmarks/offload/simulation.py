"""Caches of blocks, simulated on recorded sets: every row ((layer, KV head) pair) has slots of its own.

In a step, the blocks that are kept and in a slot are hits; the others are missed and given slots that no block of this
step is in. Blocks for which there is no slot are missed and not stored.
"""

from __future__ import annotations

import torch

AGES = (64, 32, 16, 8, 4, 2, 1)
"""Of the clock by age: it takes slots that were last used at least so many steps ago, the first age of which there are
enough."""


def new_blocks(rows: torch.Tensor) -> torch.Tensor:
    """`[steps - 1, R]`: kept blocks that the previous step did not keep; `rows` is `[steps, R, blocks]` bool."""
    return (rows[1:] & ~rows[:-1]).sum(-1)


def lru(rows: torch.Tensor, slots: list[torch.Tensor]) -> list[torch.Tensor]:
    """Hits `[steps, R]` of the least-recently-used policy for each of the sizes in `slots`, each `[R]`.

    Of blocks last used in the same step, the one with the higher index goes first. What is cached is what was used most
    lately, so that one order serves all sizes.
    """
    steps, count, blocks = rows.shape
    last_used = torch.full((count, blocks), -1, device=rows.device)
    index = torch.arange(blocks, device=rows.device)
    hits = [torch.zeros((steps, count), dtype=torch.long, device=rows.device) for _ in slots]
    for step in range(steps):
        order = (last_used * blocks - index).argsort(-1, descending=True)
        rank = torch.empty_like(order).scatter_(-1, order, index.expand(count, -1))
        found = rows[step] & (last_used >= 0)
        for own, size in zip(hits, slots, strict=True):
            own[step] = (found & (rank < size[:, None])).sum(-1)
        last_used[rows[step]] = step
    return hits


def clock(rows: torch.Tensor, slots: torch.Tensor, ages: tuple[int, ...] = (1,)) -> torch.Tensor:
    """Hits `[steps, R]` of the clock of `sparse_kernels.slot_assign` with `slots [R]`.

    A hand goes round the slots and takes those that were last used at least an age ago; the age is the first of `ages`
    of which there are enough slots, or else the last.
    """
    steps, count, blocks = rows.shape
    widest, device = int(slots.max()), rows.device
    hits = torch.zeros((steps, count), dtype=torch.long, device=device)
    if widest == 0:
        return hits
    inside = torch.arange(widest, device=device) < slots[:, None]
    stamp = torch.where(inside, -AGES[0], torch.iinfo(torch.int64).max // 2)
    # One column more than there are blocks, and than there are slots: for what is not stored.
    slot_of = torch.full((count, blocks + 1), widest, device=device)
    held = torch.full((count, widest + 1), blocks, device=device)
    hand = torch.zeros(count, dtype=torch.long, device=device)
    modulus = slots.clamp_min(1)[:, None]
    for step in range(steps):
        kept = rows[step]
        found = kept & (slot_of[:, :blocks] < widest)
        hits[step] = found.sum(-1)
        row, block = found.nonzero(as_tuple=True)
        stamp[row, slot_of[row, block]] = step
        missed = kept & ~found
        wanted = missed.sum(-1)
        ring = torch.where(inside, (hand[:, None] + torch.arange(widest, device=device)) % modulus, 0)
        age = step - stamp.gather(1, ring)
        age[~inside] = -1
        needed = torch.full((count, 1), ages[-1], device=device)
        for each in reversed(ages):
            enough = (age >= each).sum(-1) >= wanted
            needed[enough, 0] = each
        free = age >= needed
        place = free.cumsum(-1) - 1
        taken = free & (place < wanted[:, None])
        row, position = taken.nonzero(as_tuple=True)
        # The n-th missed block goes to the n-th slot that is taken.
        order = missed.int().argsort(dim=-1, descending=True, stable=True)
        block = order[row, place[row, position]]
        slot = ring[row, position]
        slot_of[row, held[row, slot]] = widest
        held[row, slot] = block
        slot_of[row, block] = slot
        stamp[row, slot] = step
        some = taken.any(-1)
        last = (taken * torch.arange(1, widest + 1, device=device)).max(-1).values
        hand = torch.where(some, (hand + last) % modulus[:, 0], hand)
    return hits
