import dataclasses

import pytest
import torch
from factories import DEVICE, DTYPES, make_paged_case, poisoned, random_block_lists
from slot_cases import as_float8, check_maps, hold_some, make_slot_case
from sparse_kernels import (
    AttentionTail,
    AttentionWorkspace,
    block_gather,
    block_unpack,
    slot_assign,
    slot_attention,
    slot_lookup,
    sparse_attention_reference,
)

CASES = [
    # lengths, page, block, dim, group, shared pages, density
    ([100, 0, 37, 16, 1], 16, 8, 64, 2, 2, 0.5),
    ([65, 64, 63], 32, 16, 128, 4, 0, 0.7),
    ([200, 200, 150], 64, 16, 96, 1, 2, 1.0),
    ([90], 16, 16, 256, 3, 0, 0.4),
]


def look_up(made, lists, counts, impl, slots_given):
    """One step's lookup; assign and gather follow if slots are given to what is missed."""
    case = made.case
    locations = poisoned(*lists.shape, dtype=torch.int32)
    sizes = {"page_size": case.page_size, "block_size": case.block_size}
    lengths = case.seq_lens[: case.batch]
    slot_lookup(
        case.page_table,
        lengths,
        lists,
        counts,
        made.epoch,
        made.maps,
        made.fetch,
        lag=0,
        **sizes,
        locations=locations,
        impl=impl,
    )
    if not slots_given:
        made.maps.slot_map[made.maps.slot_map < 0] = -1
        made.fetch.counts.zero_()
        return locations
    slot_assign(made.epoch, made.maps, made.fetch, lag=0, blocks_per_page=case.page_size // case.block_size, impl=impl)
    check_maps(made.maps)
    fetch = made.fetch
    blocks = made.host.flatten(0, 2), made.hot.flatten(0, 1)
    copy = block_unpack if made.host.dtype == torch.uint8 else block_gather
    copy(*blocks, fetch.source, fetch.target, fetch.copies, programs=3, impl=impl)
    return locations


def tail_of(case, counts, lists):
    rng = torch.Generator().manual_seed(4)
    shape = (case.batch, case.num_kv_heads, case.group_size, case.capacity)
    mass = torch.randn(shape, generator=rng).to(DEVICE)
    kept = torch.zeros(case.batch, case.num_kv_heads, case.capacity, dtype=torch.uint8, device=DEVICE)
    for b in range(case.batch):
        for h in range(case.num_kv_heads):
            kept[b, h, lists[b, h, : int(counts[b, h])].long()] = 1
    means = torch.randn(case.num_pages, case.num_kv_heads, 1, case.head_dim, generator=rng)
    return AttentionTail(mass, kept, means.to(case.k_pool.dtype).to(DEVICE))


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("slots", "held", "given"), [(0, 0.0, True), (3, 0.5, True), (60, 0.6, True), (9, 0.5, False)])
@pytest.mark.parametrize("case_number", range(len(CASES)))
@pytest.mark.parametrize("has_tail", [False, True])
@pytest.mark.parametrize("float8", [False, True])
def test_results_do_not_depend_on_where_blocks_are(impl, slots, held, given, case_number, has_tail, float8):
    lengths, page, block, dim, group, shared, density = CASES[case_number]
    dtype = DTYPES[case_number % 2]
    case = make_paged_case(
        lengths,
        page_size=page,
        block_size=block,
        head_dim=dim,
        group_size=group,
        shared_pages=shared,
        dtype=dtype,
        seed=case_number,
    )
    lists, counts = random_block_lists(case, density)
    tail = tail_of(case, counts, lists) if has_tail else None
    if float8:
        as_float8(case)
    made = make_slot_case(case, slots, float8=float8)
    hold_some(made, held, seed=7)
    locations = look_up(made, lists, counts, impl, given)
    results, log_sums = [], []
    for attend in ("plain", "slots"):
        out = poisoned(*case.q.shape).to(dtype)
        lse = poisoned(*case.q.shape[:2])
        more = {"scale": case.scale, "page_size": page, "block_size": block, "out": out, "lse": lse, "tail": tail}
        rest = (case.page_table, case.seq_lens[: case.batch], lists, counts)
        if attend == "plain":
            sparse_attention_reference(case.q, case.k_pool, case.v_pool, *rest, **more)
        else:
            workspace = AttentionWorkspace.create(3, group, dim, DEVICE)
            slot_attention(case.q, made.sources, locations, *rest, **more, workspace=workspace, impl=impl)
        results.append(out.float().cpu())
        log_sums.append(lse.cpu())
    if impl == "torch":
        assert torch.equal(*results)
        assert torch.equal(*log_sums)
    else:
        tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(log_sums[1], log_sums[0], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_long_rows_over_many_programs():
    """Rows that programs share, with blocks in slots, in open pages and on the host."""
    lengths = [5000, 0, 1, 3333]
    case = make_paged_case(
        lengths, page_size=64, block_size=16, head_dim=128, group_size=4, num_kv_heads=8, dtype=torch.bfloat16
    )
    lists, counts = random_block_lists(case, 0.3)
    made = make_slot_case(case, 60)
    hold_some(made, 0.1, seed=1)
    locations = look_up(made, lists, counts, "triton", True)
    expected, out = torch.empty_like(case.q), torch.empty_like(case.q)
    sizes = {"scale": case.scale, "page_size": 64, "block_size": 16}
    rest = (case.page_table, case.seq_lens[:4], lists, counts)
    sparse_attention_reference(case.q, case.k_pool, case.v_pool, *rest, **sizes, out=expected)
    workspace = AttentionWorkspace.create(None, 4, 128, DEVICE)
    slot_attention(case.q, made.sources, locations, *rest, **sizes, out=out, workspace=workspace)
    torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_refuses():
    case = make_paged_case([20], device="cpu")
    lists, counts = random_block_lists(case, 1.0)
    made = make_slot_case(case, 4)
    out = torch.empty_like(case.q)
    rest = (case.page_table, case.seq_lens[:1], lists, counts)
    more = {"scale": 1.0, "page_size": 16, "block_size": 8, "out": out, "workspace": None}
    with pytest.raises(ValueError, match=r"locations has shape \[1, 2, 3\]"):
        slot_attention(case.q, made.sources, torch.zeros(1, 2, 3).int(), *rest, **more)
    wrong = dataclasses.replace(made.sources, hot=made.sources.hot[:, :, :, :4])
    with pytest.raises(ValueError, match=r"sources.hot has shape \[2, 4, 2, 4, 64\]; needed: \[2, \*, 2, 8, 64\]"):
        slot_attention(case.q, wrong, lists, *rest, **more)
