import pytest
import torch
from factories import DEVICE
from slot_cases import check_maps
from sparse_kernels import FetchList, SlotMaps, slot_claim
from sparse_kernels.slot_maps import CLAIMED, NO_SLOT

IMPLS = ["torch", "triton"]


def make(number, capacity, heads=3, pool_blocks=3000):
    """A list of `number` blocks, some listed twice, of which each head has other ones in slots."""
    rng = torch.Generator().manual_seed(number)
    maps = SlotMaps.create(heads, pool_blocks, 40, DEVICE)
    for h in range(heads):
        held = torch.randperm(pool_blocks, generator=rng)[:40]
        maps.slot_map[h, held.to(DEVICE)] = torch.arange(40, dtype=torch.int32, device=DEVICE)
        maps.slot_block[h] = held.int().to(DEVICE)
    blocks = torch.randint(0, pool_blocks, (number,), generator=rng).int().to(DEVICE)
    return blocks, maps, FetchList.create(heads, capacity, DEVICE)


@pytest.mark.parametrize(("number", "capacity"), [(0, 5), (7, 5), (60, 100), (2500, 3000), (2500, 1100), (9, 0)])
@pytest.mark.parametrize("impl", IMPLS)
def test_missing_blocks_are_claimed_once_and_in_order(number, capacity, impl):
    blocks, maps, fetch = make(number, capacity)
    before = maps.slot_map.clone()
    fetch.copies.fill_(9)
    epoch = torch.tensor([100], dtype=torch.int32, device=DEVICE)
    maps.slot_stamp[:] = torch.arange(20, 60, dtype=torch.int32, device=DEVICE)
    stamps = maps.slot_stamp.clone()
    slot_claim(blocks, epoch, maps, fetch, lag=63, impl=impl)
    assert int(fetch.copies) == 0
    for h in range(3):
        missing = [b for b in dict.fromkeys(blocks.tolist()) if before[h, b] == NO_SLOT][:capacity]
        count = int(fetch.counts[h])
        assert count == len(missing)
        assert sorted(fetch.blocks[h, :count].tolist()) == sorted(missing)
        # Of a block that is listed twice within a chunk either place may win.
        if len(set(blocks.tolist())) == len(blocks):
            assert fetch.blocks[h, :count].tolist() == missing
        listed = torch.isin(maps.slot_block[h], blocks)
        assert torch.equal(maps.slot_stamp[h], torch.where(listed, stamps[h].clamp_min(37), stamps[h]))
        expected = before[h].clone()
        expected[missing] = CLAIMED
        assert torch.equal(maps.slot_map[h], expected)
        maps.slot_map[h, missing] = NO_SLOT
    check_maps(maps)


def test_refuses():
    blocks, maps, fetch = make(4, 4)
    epoch = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"blocks .*int64.*int32"):
        slot_claim(blocks.long(), epoch, maps, fetch, lag=63)
    with pytest.raises(ValueError, match=r"fetch\.blocks"):
        slot_claim(blocks, epoch, maps, FetchList.create(2, 4, DEVICE), lag=63)
