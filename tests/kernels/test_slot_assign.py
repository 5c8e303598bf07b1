import pytest
import torch
from factories import DEVICE
from slot_cases import check_maps
from sparse_kernels import FetchList, SlotMaps, slot_assign
from sparse_kernels.slot_assign import IDLE
from sparse_kernels.slot_maps import CLAIMED, NO_SLOT

IMPLS = ["torch", "triton"]
PER_PAGE = 4


def make(slots, missed, *, pool_blocks=400, capacity=60, epoch=200, heads=3, seed=0):
    """A half-filled cache with random stamps, some of it stale, and `missed` claimed blocks a head."""
    rng = torch.Generator().manual_seed(seed)
    maps = SlotMaps.create(heads, pool_blocks, slots, "cpu")
    fetch = FetchList.create(heads, capacity, "cpu")
    for h in range(heads):
        order = torch.randperm(pool_blocks, generator=rng)
        held, claimed, stale = order[: slots // 2], order[100 : 100 + missed[h]], order[200 : 200 + slots // 4]
        places = torch.randperm(slots, generator=rng)[: slots // 2 + slots // 4]
        maps.slot_block[h, places] = torch.cat((held, stale)).int()
        maps.slot_map[h, held] = places[: len(held)].int()
        # The first stale blocks have moved to another slot; the others are in none, or claimed.
        maps.slot_map[h, stale[:1]] = NO_SLOT
        claimed = torch.cat((claimed, stale[1:2])) if len(claimed) else claimed
        fetch.blocks[h, : len(claimed)] = claimed[:capacity].int()
        maps.slot_map[h, claimed[:capacity]] = CLAIMED
        fetch.counts[h] = len(claimed)
    if slots:
        maps.slot_stamp[:] = epoch - torch.randint(0, 5, maps.slot_stamp.shape, generator=rng).int()
        maps.hand[:] = torch.randint(0, slots, (heads,), generator=rng).int()
    return maps, fetch, torch.tensor([epoch], dtype=torch.int32)


def to_device(*items):
    def moved(item):
        if isinstance(item, torch.Tensor):
            return item.clone().to(DEVICE)
        return type(item)(**{name: tensor.clone().to(DEVICE) for name, tensor in vars(item).items()})

    return [moved(item) for item in items]


def copies_of(fetch):
    n = int(fetch.copies)
    return sorted(zip(fetch.target[:n].tolist(), fetch.source[:n].tolist(), strict=True))


@pytest.mark.parametrize(
    ("slots", "missed", "capacity"),
    [
        (16, [3, 0, 10], 60),
        (16, [30, 16, 1], 60),
        (100, [59, 2, 40], 60),
        (0, [2, 0, 5], 4),
        (8, [20, 3, 5], 5),
        (1, [1, 1, 2], 1),
        (1500, [50, 3, 0], 60),
    ],
)
@pytest.mark.parametrize("lag", [0, 1, IDLE])
def test_kernel_equals_reference(slots, missed, capacity, lag):
    made = make(slots, missed, capacity=capacity, pool_blocks=3200, seed=slots)
    results = []
    for impl in IMPLS:
        maps, fetch, epoch = to_device(*made)
        totals = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        slot_assign(epoch, maps, fetch, lag=lag, blocks_per_page=PER_PAGE, totals=totals, impl=impl)
        check_maps(maps)
        assert fetch.counts.tolist() == [0, 0, 0]
        results.append(([t.tolist() for t in vars(maps).values()], copies_of(fetch), totals.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_slot_is_taken_only_if_its_stamp_is_old_enough(impl, lag):
    """Demand takes any slot that this step has not used; a prefetch also spares the last step's."""
    maps, fetch, epoch = to_device(*make(40, [40, 40, 40], seed=5))
    before = {name: tensor.clone() for name, tensor in vars(maps).items()}
    slot_assign(epoch, maps, fetch, lag=lag, blocks_per_page=PER_PAGE, impl=impl)
    may = before["slot_stamp"] < 200 - lag
    assert torch.equal(maps.slot_block[~may], before["slot_block"][~may])
    assert torch.equal(maps.slot_stamp[~may], before["slot_stamp"][~may])
    assert (maps.slot_stamp[may] == 200 - lag).all()
    assert int(fetch.copies) == int(may.sum())


@pytest.mark.parametrize("impl", IMPLS)
def test_idle_slots_alone_are_taken_by_what_nobody_asked_for(impl):
    """Sources are where `source_pages` says."""
    maps, fetch, epoch = make(40, [20, 20, 20], seed=5)
    maps.slot_stamp[:, ::4] = 200 - IDLE - 1
    maps, fetch, epoch = to_device(maps, fetch, epoch)
    blocks = fetch.blocks.clone()
    source_pages = torch.arange(100, dtype=torch.int32, device=DEVICE).flip(0)
    held = maps.slot_block.clone()
    slot_assign(epoch, maps, fetch, lag=IDLE, blocks_per_page=PER_PAGE, source_pages=source_pages, impl=impl)
    idle = maps.slot_stamp == 200 - IDLE
    assert idle.sum() == int(fetch.copies) == 30
    assert torch.equal(maps.slot_block[~idle], held[~idle])
    for h in range(3):
        assert set(maps.slot_block[h][idle[h]].tolist()) == set(blocks[h, :10].tolist())
    for target, source in copies_of(fetch):
        h, block = target // 40, int(maps.slot_block.flatten()[target])
        assert source == ((99 - block // PER_PAGE) * 3 + h) * PER_PAGE + block % PER_PAGE


@pytest.mark.parametrize("impl", IMPLS)
def test_the_oldest_half_goes_first(impl):
    """Of 64 slots used 1, 2, 4 and 8 steps ago, sixteen each, sixteen misses take the oldest sixteen."""
    maps, fetch, epoch = make(64, [16, 0, 0])
    maps.slot_stamp[:] = 200 - 2 ** (torch.arange(64) % 4).int()
    fetch.counts[0] = 16
    maps, fetch, epoch = to_device(maps, fetch, epoch)
    slot_assign(epoch, maps, fetch, lag=0, blocks_per_page=PER_PAGE, impl=impl)
    assert sorted(fetch.target[:16].tolist()) == list(range(3, 64, 4))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_hand_goes_on_where_it_stopped(impl):
    maps, fetch, epoch = make(10, [3, 0, 0])
    maps.hand[0] = 8
    maps.slot_stamp[:] = 150
    fetch.counts[0] = 3
    maps, fetch, epoch = to_device(maps, fetch, epoch)
    slot_assign(epoch, maps, fetch, lag=0, blocks_per_page=PER_PAGE, impl=impl)
    assert fetch.target[:3].tolist() == [8, 9, 0]
    assert int(maps.hand[0]) == 1


@pytest.mark.parametrize("impl", IMPLS)
def test_copies_name_the_places_of_blocks_and_slots(impl):
    maps, fetch, epoch = to_device(*make(20, [4, 5, 6], seed=2))
    blocks = [fetch.blocks[h, : int(fetch.counts[h])].tolist() for h in range(3)]
    slot_assign(epoch, maps, fetch, lag=0, blocks_per_page=PER_PAGE, impl=impl)
    expected = []
    for h, own in enumerate(blocks):
        for block in own:
            slot = int(maps.slot_map[h, block])
            assert slot >= 0
            expected.append((h * 20 + slot, (block // PER_PAGE * 3 + h) * PER_PAGE + block % PER_PAGE))
    assert copies_of(fetch) == sorted(expected)


def test_refuses():
    maps, fetch, epoch = make(4, [1, 1, 1], pool_blocks=402)
    with pytest.raises(ValueError, match=r"maps.slot_map has 402 blocks; needed: a multiple of 4"):
        slot_assign(epoch, maps, fetch, lag=0, blocks_per_page=4)
    with pytest.raises(ValueError, match=r"lag is 3; allowed: 0, 1"):
        slot_assign(epoch, maps, fetch, lag=3, blocks_per_page=2)
    with pytest.raises(ValueError, match=r"epoch has dtype torch.int64"):
        slot_assign(epoch.long(), maps, fetch, lag=0, blocks_per_page=2)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_block_that_moved_keeps_its_new_slot(impl):
    """A slot that still names a block which its page's reuse put elsewhere is taken without touching the map."""
    maps, fetch, epoch = make(6, [0, 0, 0])
    maps.slot_map.fill_(NO_SLOT)
    maps.slot_block[0] = torch.tensor([7, 7, 8, 9, 10, 11])
    maps.slot_map[0, 7], maps.slot_map[0, 3] = 1, CLAIMED
    maps.slot_stamp[0] = torch.tensor([100, 199, 199, 199, 199, 199])
    fetch.blocks[0, 0], fetch.counts[0] = 3, 1
    maps, fetch, epoch = to_device(maps, fetch, epoch)
    totals = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    slot_assign(epoch, maps, fetch, lag=0, blocks_per_page=PER_PAGE, totals=totals, impl=impl)
    assert maps.slot_block[0].tolist() == [3, 7, 8, 9, 10, 11]
    assert [int(maps.slot_map[0, b]) for b in (3, 7)] == [0, 1]
    assert totals.tolist() == [0, 0, 0, 0]
