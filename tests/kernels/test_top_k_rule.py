import math

import pytest
import torch
from factories import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from rule_cases import (
    assert_ties_take_the_lower_index,
    examples,
    make_rule_case,
    mask_of,
    over_paths,
    rule_cases,
    run_rule,
)
from sparse_kernels import top_k_rule

TOP_KS = st.one_of(
    st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, 40.0, 1e6]),
    st.integers(1, 45).map(float),
    st.floats(1 / 128, 127 / 128, width=32),
)


def count_of(top_k, blocks):
    """k of a row; the product in fp32 as documented."""
    product = torch.tensor(top_k, dtype=torch.float32) * blocks
    return max(1, min(blocks, math.ceil(top_k if top_k >= 1 else float(product))))


def check_head(share, kept, forced, k):
    """`kept` is one head's set: the k with the largest share, forced ones included."""
    assert kept.sum() == max(k, int(forced.sum()))
    free = kept & ~forced
    if free.any() and (~kept).any():
        assert share[~kept].max() <= share[free].min() + 1e-7, "a larger block was dropped"


def check_lists(case, lists):
    for b, top_k in enumerate(case.targets):
        blocks, forced = case.blocks(b), case.forced(b)
        for h, row in enumerate(lists[b]):
            kept = mask_of(row, blocks)
            if case.keeps_all(b, blocks):
                assert kept.all()
                continue
            k = count_of(top_k, blocks)
            shares = case.shares(b, h)
            if case.group == "average":
                check_head(shares.mean(0), kept, forced, k)
                continue
            # The union holds each head's clear winners, and nothing that is clearly none.
            room = max(0, k - int(forced.sum()))
            wanted, possible = forced.clone(), forced.clone()
            for share in shares:
                for j in (~forced).nonzero().flatten().tolist():
                    wanted[j] |= bool((~forced & (share >= share[j] - 1e-7)).sum() <= room)
                    possible[j] |= bool((~forced & (share > share[j] + 1e-7)).sum() < room)
            assert kept[wanted].all()
            assert possible[kept].all()


@over_paths
def test_counts_and_largest(path):
    @examples(path)
    @given(rule_cases(TOP_KS))
    def check(case):
        check_lists(case, run_rule(top_k_rule, "top_k", case, path))

    check()


@over_paths
@pytest.mark.parametrize(
    ("top_k", "count"),
    [(1.0, 1), (5.0, 5), (39.0, 39), (40.0, 40), (400.0, 40), (0.25, 10), (0.251, 11), (0.01, 1), (0.0, 1)],
)
def test_count(path, top_k, count):
    case = make_rule_case([320], [top_k])
    assert [len(row) for row in run_rule(top_k_rule, "top_k", case, path)[0]] == [count] * 2


@over_paths
def test_forced_blocks_count_and_may_exceed_k(path):
    # Blocks 0, 1 (sink), 36..39 (window).
    case = make_rule_case([320, 320], [7.0, 3.0], sink_tokens=9, window_tokens=32)
    lists = run_rule(top_k_rule, "top_k", case, path)
    assert [len(row) for row in lists[0]] == [7, 7]
    assert lists[1] == [[0, 1, 36, 37, 38, 39]] * 2


@over_paths
@pytest.mark.parametrize("group", ["average", "every"])
def test_ties_take_the_lower_index(path, group):
    for levels in (1, 3):
        case = make_rule_case([300], [11.0], group=group, group_size=2, levels=levels, sink_tokens=8, kv_heads=1)
        lists = run_rule(top_k_rule, "top_k", case, path)
        check_lists(case, lists)
        kept = mask_of(lists[0][0], case.blocks(0))
        assert not kept.all(), "no choice was made"
        assert_ties_take_the_lower_index(case.shares(0, 0)[0], kept, case.forced(0))


@over_paths
def test_blocks_without_mass_fill_up_from_the_lowest(path):
    case = make_rule_case([320], [6.0])
    case.log_mass[:] = -float("inf")
    case.log_mass[..., 20:22] = 0.0
    assert run_rule(top_k_rule, "top_k", case, path) == [[[0, 1, 2, 3, 20, 21]] * 2]


@over_paths
def test_every_takes_k_for_each_head(path):
    case = make_rule_case([320], [2.0], group="every", group_size=3)
    case.log_mass[:] = 0.0
    for g in range(3):
        case.log_mass[:, :, g, [10 * g + 5, 30]] = 5.0
    assert run_rule(top_k_rule, "top_k", case, path) == [[[5, 15, 25, 30]] * 2]


@over_paths
def test_rows_below_min_context_keep_all_and_invalid_ones_too(path):
    case = make_rule_case([99, 320, 320], [2.0] * 3, min_context=100)
    case.log_mass[1, 1, 0, 4] = float("nan")
    total = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    lists = run_rule(top_k_rule, "top_k", case, path, kept_total=total)
    assert [[len(row) for row in rows] for rows in lists] == [[13, 13], [2, 40], [2, 2]]
    assert total.tolist() == [17, 55]


@pytest.mark.parametrize("path", ["triton", "chunked"])
@pytest.mark.parametrize(("group", "group_size"), [("average", 9), ("every", 1), ("every", 4)])
def test_kernel_equals_reference(path, group, group_size):
    case = make_rule_case(
        [320, 1, 0, 17, 200],
        [7.0, 1.0, 5.0, 2.0, 0.4],
        group=group,
        group_size=group_size,
        sink_tokens=4,
        window_tokens=20,
        seed=group_size,
    )
    assert run_rule(top_k_rule, "top_k", case, path) == run_rule(top_k_rule, "top_k", case, "torch")


def test_refuses():
    arguments = {
        "group": "average",
        "page_size": 16,
        "block_size": 8,
        "sink_tokens": 0,
        "window_tokens": 0,
        "min_context": 0,
        "block_lists": torch.zeros(1, 1, 8, dtype=torch.int32),
        "block_counts": torch.zeros(1, 1, dtype=torch.int32),
        "scratch": torch.zeros(1, 1, 8),
    }
    with pytest.raises(ValueError, match=r"top_k has dtype torch\.int64; allowed: torch\.float32"):
        top_k_rule(
            torch.zeros(1, 1, 2, 8),
            torch.zeros(1, dtype=torch.int32),
            top_k=torch.zeros(1, dtype=torch.int64),
            **arguments,
        )
