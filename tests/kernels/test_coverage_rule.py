import pytest
import torch
from factories import DEVICE, poisoned
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
from sparse_kernels import _select, coverage_rule

GAMMAS = st.one_of(st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0, 2.0]), st.floats(1 / 128, 1 - 1 / 8192, width=32))
TOLERANCE = 1e-5


def check_lists(case, lists):
    """Coverage, minimality and the order of ties, from float64 shares."""
    for b, gamma in enumerate(case.targets):
        blocks, forced = case.blocks(b), case.forced(b)
        for h, row in enumerate(lists[b]):
            kept = mask_of(row, blocks)
            if case.keeps_all(b, 1.0):
                assert kept.all()
                continue
            if blocks == 0:
                continue
            shares = case.shares(b, h)
            if case.group == "average":
                check_average(shares.mean(0), kept, forced, gamma)
            else:
                check_every(shares, kept, forced, gamma)


def check_average(share, kept, forced, gamma):
    coverage = float(share[kept].sum())
    assert coverage >= gamma - TOLERANCE
    free = kept & ~forced
    if free.any() and kept.sum() > 1:
        assert coverage - float(share[free].min()) < gamma + TOLERANCE, "its smallest free block is not needed"
    if free.any() and (~kept).any():
        assert share[~kept].max() <= share[free].min() + 1e-7, "a larger block was dropped"


def check_every(shares, kept, forced, gamma):
    assert (shares[:, kept].sum(1) >= gamma - TOLERANCE).all()
    # A head takes block j while forced blocks and those before j in its own order miss gamma.
    needs = torch.zeros_like(kept)
    for share in shares:
        for j in (~forced).nonzero().flatten().tolist():
            earlier = ~forced & (share > share[j] + 1e-7)
            before = share[forced].sum() + share[earlier].sum()
            needs[j] |= bool(before < gamma + TOLERANCE)
    if not forced.any():
        needs[shares.argmax(1)] = True
    assert (forced | needs)[kept].all(), "a block that no head needs"


@over_paths
def test_coverage_and_minimality(path):
    @examples(path)
    @given(rule_cases(GAMMAS))
    def check(case):
        check_lists(case, run_rule(coverage_rule, "gamma", case, path))

    check()


@over_paths
@pytest.mark.parametrize("group", ["average", "every"])
def test_ties_take_the_lower_index(path, group):
    for levels, gamma in ((1, 0.3), (1, 0.77), (3, 0.9), (2, 0.95)):
        case = make_rule_case([300], [gamma], group=group, group_size=2, levels=levels, sink_tokens=8, kv_heads=1)
        lists = run_rule(coverage_rule, "gamma", case, path)
        check_lists(case, lists)
        kept = mask_of(lists[0][0], case.blocks(0))
        assert not kept.all(), "no choice was made"
        assert_ties_take_the_lower_index(case.shares(0, 0)[0], kept, case.forced(0))


@over_paths
def test_equal_blocks_are_taken_one_by_one(path):
    # 40 equal shares of 0.025; the forced ones, 0 and 39, count: 0.31 needs 13 blocks.
    case = make_rule_case([320], [0.31], levels=1, sink_tokens=8, window_tokens=8)
    assert run_rule(coverage_rule, "gamma", case, path) == [[[*range(12), 39]] * 2]


@over_paths
@pytest.mark.parametrize("group", ["average", "every"])
def test_gamma_one_keeps_all(path, group):
    case = make_rule_case([320, 133, 0, 1], [1.0, 1.5, 1.0, 1.0], group=group, spread=30.0)
    lists = run_rule(coverage_rule, "gamma", case, path)
    assert lists == [[list(range(case.blocks(b)))] * 2 for b in range(4)]


@over_paths
def test_rows_below_min_context_keep_all(path):
    case = make_rule_case([99, 100], [0.2, 0.2], min_context=100)
    lists = run_rule(coverage_rule, "gamma", case, path)
    assert lists[0] == [list(range(13))] * 2
    assert all(len(row) < 13 for row in lists[1])


@over_paths
def test_every_unites_heads_where_average_would_not(path):
    case = make_rule_case([320], [0.9], group="every", group_size=4)
    case.log_mass[:] = 0.0
    for g in range(4):
        case.log_mass[:, :, g, 10 * g + 5] = 20.0
    assert run_rule(coverage_rule, "gamma", case, path) == [[[5, 15, 25, 35]] * 2]
    case.group, case.targets = "average", [0.7]
    assert run_rule(coverage_rule, "gamma", case, path) == [[[5, 15, 25]] * 2]


@over_paths
def test_gamma_differs_between_requests(path):
    case = make_rule_case([320] * 3, [0.3, 0.9, 0.999])
    case.log_mass[:] = case.log_mass[:1]
    few, more, most = (row[0] for row in run_rule(coverage_rule, "gamma", case, path))
    assert set(few) < set(more) < set(most)


@over_paths
@pytest.mark.parametrize("group", ["average", "every"])
def test_gamma_differs_between_kv_heads(path, group):
    case = make_rule_case([320, 300], [0.9, 0.9], group=group)
    by_head = torch.tensor([[0.3, 0.999], [1.0, 0.8]], device=DEVICE)
    together = run_rule(coverage_rule, "gamma", case, path, targets=by_head)
    for head in range(2):
        case.targets = by_head[:, head].tolist()
        alone = run_rule(coverage_rule, "gamma", case, path)
        assert [row[head] for row in together] == [row[head] for row in alone]
    assert len(together[1][0]) == case.blocks(1) > len(together[1][1])


@over_paths
@pytest.mark.parametrize("group", ["average", "every"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_valid_shares_keeps_all(path, group, value):
    case = make_rule_case([320, 320], [0.5, 0.5], group=group)
    case.log_mass[0, 0, 1, 7] = value
    lists = run_rule(coverage_rule, "gamma", case, path)
    assert lists[0][0] == list(range(40))
    assert all(len(row) < 40 for row in (lists[0][1], *lists[1]))


@over_paths
def test_blocks_without_mass(path):
    case = make_rule_case([320], [0.999999])
    case.log_mass[..., 3:] = -float("inf")
    assert run_rule(coverage_rule, "gamma", case, path) == [[[0, 1, 2]] * 2]


@over_paths
def test_gamma_out_of_reach_of_rounding_keeps_all(path):
    # The largest fp32 below 1: the sum of 40 rounded shares may miss it.
    case = make_rule_case([320], [1 - 2**-24], spread=0.1)
    for row in run_rule(coverage_rule, "gamma", case, path)[0]:
        assert len(row) >= 39


@over_paths
def test_kept_total_grows_by_the_counts(path):
    case = make_rule_case([320, 0, 133], [0.9] * 3)
    total = torch.tensor([100, 2**40], device=DEVICE)
    lists = run_rule(coverage_rule, "gamma", case, path, kept_total=total)
    assert total.tolist() == [base + sum(len(rows[h]) for rows in lists) for h, base in enumerate([100, 2**40])]


@pytest.mark.parametrize("path", ["triton", "chunked"])
@pytest.mark.parametrize(("group", "group_size"), [("average", 1), ("average", 16), ("every", 7)])
def test_kernel_equals_reference(path, group, group_size):
    case = make_rule_case(
        [320, 1, 0, 17, 200],
        [0.9, 0.5, 0.5, 0.1, 0.99],
        group=group,
        group_size=group_size,
        sink_tokens=4,
        window_tokens=20,
        seed=group_size,
    )
    assert run_rule(coverage_rule, "gamma", case, path) == run_rule(coverage_rule, "gamma", case, "torch")


@pytest.mark.parametrize("path", ["torch", "triton", "chunked"] if DEVICE == "cuda" else ["torch", "triton"])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_sums_over_long_rows_are_exact_to_1e_6(path, spread):
    """The true coverage of the chosen set is at least gamma, and without its smallest block below it, both within
    1e-6."""
    capacity, gamma = (65536 if DEVICE == "cuda" else 4096), 0.9
    case = make_rule_case([capacity * 8], [gamma], spread=spread, capacity=capacity, group_size=2, kv_heads=1)
    kept = mask_of(run_long(case, path), capacity)
    share = case.shares(0, 0).mean(0)
    assert share[kept].sum() >= gamma - 1e-6
    assert share[kept].sum() - share[kept].min() < gamma + 1e-6


@pytest.mark.parametrize("capacity", [300, 304])
def test_a_row_takes_the_size_that_holds_it(monkeypatch, capacity):
    """Rows of each size, on both sides of its end, in one batch; the longest go through scratch."""
    monkeypatch.setattr(_select, "SINGLE_SIZES", (128, 256))
    monkeypatch.setattr(_select, "CHUNK", 64)
    lengths = [blocks * 8 for blocks in (0, 1, 127, 128, 129, 255, 256, 257, 300)]
    case = make_rule_case(lengths, [0.9] * 9, capacity=capacity, sink_tokens=8, window_tokens=16, kv_heads=1)
    expected = run_rule(coverage_rule, "gamma", case, "torch")
    assert any(len(row) < case.blocks(b) for b, (row,) in enumerate(expected))
    assert run_rule(coverage_rule, "gamma", case, "triton") == expected


def run_long(case, path):
    """`run_rule` for one long row, in the chunks that production uses."""
    capacity = case.log_mass.shape[3]
    lists, counts = poisoned(1, 1, capacity, dtype=torch.int32), poisoned(1, 1, dtype=torch.int32)
    if path == "triton" and capacity > max(_select.SINGLE_SIZES):
        pytest.skip("rows of this length are always chunked")
    log_mass, seq_lens, gamma = case.tensors()
    coverage_rule(
        log_mass,
        seq_lens,
        gamma=gamma,
        group="average",
        page_size=16,
        block_size=8,
        sink_tokens=0,
        window_tokens=0,
        min_context=0,
        block_lists=lists,
        block_counts=counts,
        scratch=poisoned(1, 1, capacity),
        impl="torch" if path == "torch" else "triton",
    )
    return lists[0, 0, : int(counts)].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": "all"}, "group is 'all'; allowed: average, every"),
        ({"gamma": torch.zeros(1, dtype=torch.float64)}, "gamma has dtype torch.float64"),
        ({"gamma": torch.zeros(0)}, "gamma has shape"),
        ({"sink_tokens": -1}, "sink_tokens is -1; needed: 0 or more"),
        ({"block_lists": torch.zeros(1, 1, 7, dtype=torch.int32)}, "block_lists has shape"),
        ({"gamma": torch.zeros(1, 3)}, "gamma has shape"),
        ({"scratch": torch.zeros(1, 1, 8, dtype=torch.int32)}, "scratch has dtype"),
        ({"kept_total": torch.zeros(1, dtype=torch.int32)}, "kept_total has dtype"),
    ],
)
def test_refuses(change, message):
    arguments = {
        "gamma": torch.zeros(1),
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
    with pytest.raises(ValueError, match=message):
        coverage_rule(torch.zeros(1, 1, 2, 8), torch.zeros(1, dtype=torch.int32), **(arguments | change))
