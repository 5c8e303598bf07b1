import pytest
import torch
from factories import DEVICE, HUGE_PAGE, make_paged_case, poisoned, random_block_lists
from slot_cases import closed_blocks, hold_some, make_slot_case
from sparse_kernels import slot_lookup
from sparse_kernels.slot_maps import CLAIMED, NO_SLOT, OPEN

IMPLS = ["torch", "triton"]


def run(made, lists, counts, impl, lag=0, **more):
    case = made.case
    locations = poisoned(*lists.shape, dtype=torch.int32)
    totals = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    slot_lookup(
        case.page_table,
        case.seq_lens[: case.batch],
        lists,
        counts,
        made.epoch,
        made.maps,
        made.fetch,
        lag=lag,
        page_size=case.page_size,
        block_size=case.block_size,
        locations=locations,
        totals=totals,
        impl=impl,
        **more,
    )
    return locations.cpu(), totals.tolist()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("lengths", "page_size", "block_size", "shared", "density", "slots"),
    [
        ([100, 0, 37, 16], 16, 8, 2, 0.5, 9),
        ([1, 65, 64, 63], 32, 16, 0, 0.7, 4),
        ([200, 200, 150], 64, 16, 2, 1.0, 30),
        ([300], 16, 16, 0, 0.4, 0),
        ([1200, 700], 16, 8, 20, 0.9, 40),
    ],
)
@pytest.mark.parametrize("lag", [0, 1])
def test_every_listed_block_is_found_missed_once_or_open(
    impl, lengths, page_size, block_size, shared, density, slots, lag
):
    case = make_paged_case(lengths, page_size=page_size, block_size=block_size, shared_pages=shared)
    made = make_slot_case(case, slots, capacity=400)
    hold_some(made, 0.4, seed=3)
    before, stamps = made.maps.slot_map.clone(), made.maps.slot_stamp.clone()
    lists, counts = random_block_lists(case, density)
    locations, totals = run(made, lists, counts, impl, lag)
    per_page = page_size // block_size
    missed = [set() for _ in range(case.num_kv_heads)]
    hits = 0
    for b in range(case.batch):
        for h in range(case.num_kv_heads):
            count = int(counts[b, h])
            assert (locations[b, h, count:] == poisoned(1, dtype=torch.int32).item()).all()
            for i in range(count):
                j, location = int(lists[b, h, i]), int(locations[b, h, i])
                if j // per_page == (lengths[b] - 1) // page_size:
                    assert location == OPEN - j % per_page
                    continue
                block = int(case.page_table[b, j // per_page]) * per_page + j % per_page
                slot = int(before[h, block])
                if slot >= 0:
                    assert location == slot
                    assert made.maps.slot_stamp[h, slot] == 100 - lag
                    stamps[h, slot] = 100 - lag
                    hits += 1
                else:
                    assert location == -1 - block
                    missed[h].add(block)
    for h, blocks in enumerate(missed):
        assert int(made.fetch.counts[h]) == len(blocks)
        assert sorted(made.fetch.blocks[h, : len(blocks)].tolist()) == sorted(blocks)
        before[h, sorted(blocks)] = CLAIMED
    assert torch.equal(made.maps.slot_map, before)
    assert torch.equal(made.maps.slot_stamp, stamps)
    assert totals == [hits, sum(map(len, missed)), 0, 0]
    assert made.fetch.copies.item() == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_misses_beyond_the_list_are_not_claimed(impl):
    case = make_paged_case([200, 200], shared_pages=6)
    made = make_slot_case(case, slots=3)
    lists, counts = random_block_lists(case, 1.0)
    run(made, lists, counts, impl)
    for h in range(2):
        listed = made.fetch.blocks[h].tolist()
        assert len(set(listed)) == 3
        assert set(listed) <= {*closed_blocks(case, 0), *closed_blocks(case, 1)}
        assert int(made.fetch.counts[h]) > 3
        assert (made.maps.slot_map[h] == CLAIMED).nonzero().flatten().tolist() == sorted(listed)


@pytest.mark.parametrize("impl", IMPLS)
def test_padded_rows_change_nothing(impl):
    case = make_paged_case([0, 0])
    made = make_slot_case(case, slots=4)
    made.maps.slot_stamp.fill_(7)
    lists = torch.full((2, 2, case.capacity), HUGE_PAGE, dtype=torch.int32, device=DEVICE)
    made.fetch.copies.fill_(5)
    locations, totals = run(made, lists, torch.full((2, 2), 2**30, dtype=torch.int32, device=DEVICE), impl)
    assert (locations == poisoned(1, dtype=torch.int32).item()).all()
    assert (made.maps.slot_map == NO_SLOT).all()
    assert (made.maps.slot_stamp == 7).all()
    assert made.fetch.counts.tolist() == [0, 0]
    assert made.fetch.copies.item() == 0
    assert totals == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lag": 2}, "lag is 2; allowed: 0, 1"),
        ({"block_size": 32}, "block_size is 32; needed: a divisor of page_size=16"),
        ({"totals": torch.zeros(3, dtype=torch.int64)}, r"totals has shape \[3\]; needed: \[4\]"),
        ({"locations": torch.zeros(1, 2, 3)}, "locations has shape"),
    ],
)
def test_refuses(change, message):
    case = make_paged_case([20], device="cpu")
    lists, counts = random_block_lists(case, 1.0)
    made = make_slot_case(case, slots=4)
    arguments = {"lag": 0, "page_size": 16, "block_size": 8} | change
    with pytest.raises(ValueError, match=message):
        slot_lookup(case.page_table, case.seq_lens[:1], lists, counts, made.epoch, made.maps, made.fetch, **arguments)
