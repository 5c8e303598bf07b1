"""The tap copies one row of a selection and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from factories import DEVICE, poisoned
from rule_cases import CAPACITY, PATHS, make_rule_case, run_rule
from sparse_kernels import SelectionTap, TapPoint, coverage_rule, top_k_rule

RULES = {"gamma": (coverage_rule, 0.8), "top_k": (top_k_rule, 9.0)}
HEAD_DIM = 96
LENGTHS = [320, 133, 0, 60]
"""The last is below the minimum context of `make_case`, the third is padding."""

over_rules = pytest.mark.parametrize("name", list(RULES))
over_paths = pytest.mark.parametrize("path", PATHS)


def make_case(name, group="average"):
    return make_rule_case(LENGTHS, [RULES[name][1]] * 4, group=group, min_context=100, sink_tokens=8, window_tokens=9)


def make_tap(case) -> SelectionTap:
    """A tap whose buffers are poisoned but for the target, which is disarmed."""
    _, kv_heads, group_size, _ = case.log_mass.shape
    dtype = torch.float16
    return SelectionTap(
        target=torch.full((2,), -1, dtype=torch.int32, device=DEVICE),
        q=poisoned(kv_heads * group_size, HEAD_DIM, dtype=dtype),
        block_lists=poisoned(kv_heads, CAPACITY, dtype=torch.int32),
        block_counts=poisoned(kv_heads, dtype=torch.int32),
        seq_len=poisoned(1, dtype=torch.int32),
    )


def point(case, tap, layer=3, first_row=0) -> TapPoint:
    """Queries are every other head of a larger tensor, so that their strides matter."""
    batch, kv_heads, group_size, _ = case.log_mass.shape
    shape = (batch, 2 * kv_heads * group_size, HEAD_DIM)
    q = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(torch.float16).to(DEVICE)
    return TapPoint(tap, layer, q[:, ::2], first_row)


def run(name, case, path, tap=None):
    return run_rule(RULES[name][0], name, case, path, tap=tap)


def assert_untouched(tap: SelectionTap, fresh: SelectionTap) -> None:
    for name in ("q", "block_lists", "block_counts", "seq_len"):
        assert torch.equal(getattr(tap, name).view(torch.uint8), getattr(fresh, name).view(torch.uint8)), name


@over_rules
@over_paths
@pytest.mark.parametrize("group", ["average", "every"])
@pytest.mark.parametrize("first_row", [0, 10])
def test_the_tap_gets_the_row_it_names(name, path, group, first_row):
    case = make_case(name, group)
    plain = run(name, case, path)
    assert len(plain[0][0]) < case.blocks(0), "no choice was made"
    for b, length in enumerate(LENGTHS):
        tap = make_tap(case)
        tap.arm(3, first_row + b)
        assert tap.seq_len.item() == 0
        at = point(case, tap, first_row=first_row)
        assert run(name, case, path, at) == plain, "the tap changed the selection"
        assert tap.seq_len.tolist() == [length]
        assert torch.equal(tap.q, at.q[b])
        assert tap.block_counts.tolist() == [len(row) for row in plain[b]]
        poison = poisoned(1, dtype=torch.int32).item()
        for listed, row in zip(tap.block_lists.tolist(), plain[b], strict=True):
            assert listed == row + [poison] * (CAPACITY - len(row))


@over_rules
@over_paths
def test_a_row_without_valid_shares_is_tapped_whole(name, path):
    case = make_case(name)
    case.log_mass[0, 1, 1, 7] = float("nan")
    tap = make_tap(case)
    tap.arm(3, 0)
    run(name, case, path, point(case, tap))
    assert tap.block_lists[1].tolist() == list(range(case.blocks(0)))
    assert tap.block_counts[0] < tap.block_counts[1] == case.blocks(0)


@over_rules
@over_paths
def test_other_layers_and_rows_leave_the_tap_alone(name, path):
    case = make_case(name)
    tap = make_tap(case)
    for target, first_row in (((-1, -1), 0), ((2, 0), 0), ((3, 4), 0), ((3, 9), 10), ((3, 0), 1), ((-1, 0), 0)):
        tap.target.copy_(torch.tensor(target, dtype=torch.int32))
        run(name, case, path, point(case, tap, first_row=first_row))
        assert_untouched(tap, make_tap(case))


@over_rules
@over_paths
def test_disarming_keeps_what_was_tapped(name, path):
    case = make_case(name)
    tap = make_tap(case)
    tap.arm(3, 1)
    run(name, case, path, point(case, tap))
    kept = tap.block_lists.clone()
    tap.disarm()
    run(name, make_rule_case(LENGTHS, [1.0] * 4, seed=9), path, point(case, tap))
    assert torch.equal(tap.block_lists, kept)
    assert tap.seq_len.tolist() == [LENGTHS[1]]


def test_all_paths_tap_the_same():
    case = make_case("gamma")
    tapped = []
    for path in PATHS:
        tap = make_tap(case)
        tap.arm(3, 0)
        run("gamma", case, path, point(case, tap))
        tapped.append(tap)
    for tap in tapped[1:]:
        for name in ("q", "block_lists", "block_counts", "seq_len"):
            assert torch.equal(*(getattr(t, name).view(torch.uint8) for t in (tap, tapped[0]))), name


def test_a_created_tap_is_disarmed_and_fits():
    tap = SelectionTap.create(
        kv_heads=2, group_size=3, head_dim=HEAD_DIM, capacity=CAPACITY, dtype=torch.float16, device=DEVICE
    )
    case = make_case("gamma")
    point(case, tap).check(case.log_mass.shape)
    assert tap.target.tolist() == [-1, -1]
    assert tap.bytes == 2 * 4 + 6 * HEAD_DIM * 2 + 2 * CAPACITY * 4 + 2 * 4 + 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, HEAD_DIM, dtype=torch.float16)}, r"tap.q has shape \[5, 96\]; needed: \[6, 96\]"),
        ({"q": torch.zeros(6, HEAD_DIM)}, "tap.q has dtype torch.float32"),
        ({"target": torch.zeros(2, dtype=torch.int64)}, "tap.target has dtype torch.int64"),
        ({"block_lists": torch.zeros(2, CAPACITY - 1, dtype=torch.int32)}, "tap.block_lists has shape"),
        ({"block_counts": torch.zeros(2, 2, dtype=torch.int32)[:, 0]}, "tap.block_counts has strides"),
        ({"seq_len": torch.zeros(2, dtype=torch.int32)}, "tap.seq_len has shape"),
    ],
)
def test_refuses_a_tap_of_another_shape(change, message):
    case = make_case("gamma")
    tap = SelectionTap(**{**vars(make_tap(case)), **change})
    with pytest.raises(ValueError, match=message):
        run("gamma", case, "torch", point(case, tap))


def test_refuses_queries_of_another_batch():
    case = make_case("gamma")
    at = TapPoint(make_tap(case), 0, torch.zeros(3, 6, HEAD_DIM, dtype=torch.float16))
    with pytest.raises(ValueError, match="q has shape"):
        run("gamma", case, "torch", at)
