"""Single properties of a decode step under offload."""

from __future__ import annotations

import pytest
import torch
from world import GEOMETRY, LAYERS, World

AMPLE = 40


def world_with_shared_prefix(slots: tuple[int, ...]) -> World:
    """Two requests on one cached prefix of two pages, each with a page of its own that is open."""
    world = World(slots)
    world.start(tokens=33)
    world.end(0, keep=True)
    for _ in range(2):
        assert world.start(tokens=5, prefix=0)
    return world


def test_a_shared_prefix_that_two_rows_ask_for_is_fetched_once() -> None:
    world = world_with_shared_prefix((AMPLE, AMPLE))
    world.decode(density=1.0)
    prefix_blocks = 2 * GEOMETRY.blocks_per_page
    for layer in range(LAYERS):
        hits, misses, direct, evictions = world.cache.totals[layer].tolist()
        assert (hits, misses, direct, evictions) == (0, prefix_blocks * GEOMETRY.kv_heads, 0, 0)
        assert int((world.cache.maps[layer].slot_map >= 0).sum()) == prefix_blocks * GEOMETRY.kv_heads
    world.decode(density=1.0)
    # Now both find it.
    assert world.cache.totals[:, 0].tolist() == [2 * prefix_blocks * GEOMETRY.kv_heads] * LAYERS


def test_without_slots_everything_is_read_from_the_host() -> None:
    world = world_with_shared_prefix((0, 0))
    world.decode(density=1.0)
    hits, misses, direct, evictions = world.cache.totals[0].tolist()
    assert (hits, evictions) == (0, 0)
    assert misses == direct == 2 * 2 * GEOMETRY.blocks_per_page * GEOMETRY.kv_heads
    world.check()


def test_a_padded_batch_changes_no_map() -> None:
    world = world_with_shared_prefix((8, 3))
    world.decode(density=0.6)
    before = [[t.clone() for t in vars(maps).values()] for maps in world.cache.maps]
    pools = world.host.blocks.clone(), world.cache.open_k.clone(), world.cache.open_v.clone()
    waiting, world.requests = world.requests, []
    world.decode(density=1.0, padding=3)
    world.requests = waiting
    for maps, old in zip(world.cache.maps, before, strict=True):
        assert all(torch.equal(new, each) for new, each in zip(vars(maps).values(), old, strict=True))
    for new, old in zip((world.host.blocks, world.cache.open_k, world.cache.open_v), pools, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def test_the_first_token_of_a_page_takes_its_blocks_out_of_the_cache() -> None:
    world = World((AMPLE, AMPLE), pages=4)
    world.start(tokens=40)
    world.decode(density=1.0)
    pages = list(world.requests[0].pages)
    assert (world.cache.maps[0].slot_map[:, pages[0] * 2 : pages[0] * 2 + 2] >= 0).all()
    world.end(0, keep=False)
    world.start(tokens=40)
    assert sorted(world.requests[0].pages) == sorted(pages)
    assert (world.cache.maps[0].slot_map < 0).all()
    world.decode(density=1.0)
    world.check()


def test_a_step_that_ran_on_after_the_end_is_harmless() -> None:
    """The overlap scheduler sees the end a step late: the token of that step is written, and its page freed."""
    world = World((AMPLE, 3), pages=5)
    world.start(tokens=32)
    world.decode(density=1.0)
    world.end(0, keep=True, unseen=1)
    assert world.tree == [world.tree[0][:2]]
    world.start(tokens=20, prefix=0)
    world.decode(density=1.0, forecast=1.0)
    world.check()


@pytest.mark.parametrize("slots", [0, 1, 5, AMPLE])
def test_retracted_requests_come_back_with_the_same_answers(slots: int) -> None:
    """Keys and values that are computed anew go wherever there is room; `decode` compares what is attended to."""
    world = World((slots, slots), pages=6)
    world.start(tokens=30)
    world.start(tokens=30)
    for _ in range(20):
        world.decode(density=0.8)
        world.check()
    assert len(world.requests) < 2
    world.start(tokens=10)
    world.decode(density=0.8)
    world.check()


def test_a_forecast_leaves_alone_what_the_last_step_read() -> None:
    world = World((2, 2), pages=8)
    world.start(tokens=90)
    table = torch.tensor([world.requests[0].pages], dtype=torch.int32)
    table = torch.cat((table, torch.zeros((1, 2), dtype=torch.int32)), 1)
    lengths = torch.tensor([91], dtype=torch.int32)

    def listed(*blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        lists = torch.tensor([[blocks] * 2], dtype=torch.int32)
        return lists, torch.full((1, 2), len(blocks), dtype=torch.int32)

    def held() -> set[int]:
        maps = world.cache.maps[1]
        return set(maps.slot_block[0][maps.slot_map[0][maps.slot_block[0].long()] >= 0].tolist())

    pool = [int(table[0, j // 2]) * 2 + j % 2 for j in range(10)]
    step = world.step
    step.locations = step.locations[:, :, :2]
    step.begin()
    step.fetch(1, table, lengths, *listed(0, 1))
    step.begin()
    step.prefetch(1, table, lengths, *listed(2, 3))
    assert held() == {pool[0], pool[1]}
    step.begin()
    step.prefetch(1, table, lengths, *listed(2, 3))
    assert held() == {pool[2], pool[3]}
    # Another forecast of the same step does not displace the first; demand displaces what was not asked for.
    step.prefetch(1, table, lengths, *listed(4, 5))
    assert held() == {pool[2], pool[3]}
    step.fetch(1, table, lengths, *listed(3, 6))
    assert held() == {pool[3], pool[6]}
    world.check()


def test_what_prefill_installed_is_not_missed_by_the_first_step() -> None:
    world = World((AMPLE, AMPLE), installs=True)
    world.start(tokens=75)
    world.check()
    world.decode(density=1.0)
    blocks = 4 * GEOMETRY.blocks_per_page * GEOMETRY.kv_heads
    assert world.cache.totals.tolist() == [[blocks, 0, 0, 0]] * LAYERS


def test_an_install_takes_no_slot_that_a_step_has_used_lately() -> None:
    world = World((8, 6), pages=12)
    world.start(tokens=60)
    world.decode(density=1.0)
    world.installs = True
    held = [maps.slot_block.clone() for maps in world.cache.maps]
    # What the last step used, and what one did 60 steps before.
    world.cache.epoch += 60
    for maps in world.cache.maps:
        maps.slot_stamp[:, 0] += 60 * (maps.slot_stamp[:, 0] > 0).int()
    used = [maps.slot_stamp > 0 for maps in world.cache.maps]
    assert all(each.sum() == 2 * 6 for each in used)
    world.start(tokens=50)
    for maps, before, mask in zip(world.cache.maps, held, used, strict=True):
        assert torch.equal(maps.slot_block[mask], before[mask])
    # In layer 0 two slots a head were free; in layer 1 none.
    new = {2 * page + i for page in world.requests[1].pages for i in range(2)}
    assert [int(torch.isin(maps.slot_block, torch.tensor(list(new))).sum()) for maps in world.cache.maps] == [4, 0]
    world.decode(density=0.7)
    world.check()


def test_the_latest_pages_are_installed_if_not_all_fit() -> None:
    """Of a later chunk, the new ones take the place of the first chunk's, which no step has read."""
    for seed in range(6):
        world = World((4, 2), seed=seed, installs=True)
        world.start(tokens=100)
        pages = world.requests[0].pages
        for maps in world.cache.maps:
            for held in maps.slot_block:
                assert {2 * pages[5], 2 * pages[5] + 1} <= set(held.tolist())
        world.check()
