import dataclasses

import pytest
import torch
from factories import DEVICE, DTYPES, make_paged_case, poisoned, random_block_lists
from sparse_kernels import AttentionTail, AttentionWorkspace, sparse_attention_reference, split_attention
from split_cases import split_keys, without_split_keys

CASES = [
    # lengths, page, block, dim, group, shared pages, density
    ([100, 0, 37, 16, 1], 16, 8, 64, 2, 2, 0.5),
    ([65, 64, 63], 32, 16, 128, 4, 0, 0.7),
    ([200, 200, 150], 64, 16, 96, 1, 2, 1.0),
    ([90], 16, 16, 256, 3, 0, 0.4),
    ([300, 127, 128, 129], 128, 32, 64, 7, 0, 0.3),
    ([5, 700], 64, 64, 64, 16, 0, 0.6),
]


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
@pytest.mark.parametrize("case_number", range(len(CASES)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "key_bias"), [("lists", 20.0), ("tail", 0.0), ("all", 20.0)])
def test_equals_attention_to_the_keys_that_split_ones_stand_for(impl, case_number, dtype, kind, key_bias):
    lengths, page, block, dim, group, shared, density = CASES[case_number]
    case = make_paged_case(
        lengths,
        page_size=page,
        block_size=block,
        head_dim=dim,
        group_size=group,
        shared_pages=shared,
        dtype=dtype,
        seed=case_number,
        key_bias=key_bias,
    )
    lists, counts = random_block_lists(case, density) if kind != "all" else (None, None)
    tail = tail_of(case, counts, lists) if kind == "tail" else None
    keys = split_keys(case)
    plain = without_split_keys(case, keys)
    sizes = {"scale": case.scale, "page_size": page, "block_size": block}
    rest = (case.page_table, case.seq_lens[: case.batch], lists, counts)
    expected, expected_lse = poisoned(*case.q.shape), poisoned(*case.q.shape[:2])
    wide = tail and dataclasses.replace(tail, value_means=tail.value_means.float())
    sparse_attention_reference(
        plain.q, plain.k_pool, plain.v_pool, *rest, **sizes, out=expected, lse=expected_lse, tail=wide
    )
    out, lse = poisoned(*case.q.shape).to(dtype), poisoned(*case.q.shape[:2])
    workspace = AttentionWorkspace.create(3, group, dim, DEVICE)
    split_attention(
        case.q, keys, case.v_pool, *rest, **sizes, out=out, lse=lse, tail=tail, workspace=workspace, impl=impl
    )
    # Weights and values are multiplied in the pool's dtype; scores of large keys are rounded with the folded query.
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)


def test_large_queries_and_ranges_stay_finite():
    case = make_paged_case([150], page_size=64, block_size=16, head_dim=64, dtype=DTYPES[0])
    case.k_pool *= 40
    case.q *= 3000
    keys = split_keys(case)
    lists, counts = random_block_lists(case, 0.6)
    out = poisoned(*case.q.shape).to(DTYPES[0])
    workspace = AttentionWorkspace.create(3, 2, 64, DEVICE)
    rest = (case.page_table, case.seq_lens[:1], lists, counts)
    sizes = {"scale": case.scale, "page_size": 64, "block_size": 16}
    split_attention(case.q, keys, case.v_pool, *rest, **sizes, out=out, workspace=workspace, impl="triton")
    assert out.isfinite().all()


@pytest.mark.gpu
def test_long_rows_over_many_programs():
    lengths = [5000, 0, 1, 3333]
    case = make_paged_case(
        lengths, page_size=64, block_size=16, head_dim=128, group_size=4, num_kv_heads=8, dtype=torch.bfloat16
    )
    lists, counts = random_block_lists(case, 0.3)
    keys = split_keys(case)
    plain = without_split_keys(case, keys)
    expected, out = torch.empty_like(plain.q), torch.empty_like(case.q)
    sizes = {"scale": case.scale, "page_size": 64, "block_size": 16}
    rest = (case.page_table, case.seq_lens[:4], lists, counts)
    sparse_attention_reference(plain.q, plain.k_pool, plain.v_pool, *rest, **sizes, out=expected)
    workspace = AttentionWorkspace.create(None, 4, 128, DEVICE)
    split_attention(case.q, keys, case.v_pool, *rest, **sizes, out=out, workspace=workspace)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def test_refuses():
    case = make_paged_case([20])
    lists, counts = random_block_lists(case, 1.0)
    keys = split_keys(case)
    out = torch.empty_like(case.q)
    rest = (case.page_table, case.seq_lens[:1], lists, counts)
    more = {"scale": 1.0, "page_size": 16, "block_size": 8, "out": out, "workspace": None}
    wrong = dataclasses.replace(keys, residual=keys.residual.to(torch.int8))
    with pytest.raises(ValueError, match=r"residual has dtype torch.int8"):
        split_attention(case.q, wrong, case.v_pool, *rest, **more)
    wrong = dataclasses.replace(keys, open_rows=keys.open_rows.long())
    with pytest.raises(ValueError, match=r"keys.open_rows has dtype torch.int64"):
        split_attention(case.q, wrong, case.v_pool, *rest, **more)
    with pytest.raises(ValueError, match="tail is given without block_lists"):
        split_attention(case.q, keys, case.v_pool, *rest[:2], None, None, **more, tail=tail_of(case, counts, lists))
