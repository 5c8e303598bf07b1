"""Rows split over clusters of thread blocks: the search of both rules in segments.

Without a GPU the search runs in one segment, and in several whose programs exchange what they have in Python.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import DEVICE, poisoned
from interpreted_clusters import simulate_clusters
from rule_cases import RuleCase, device_clusters, make_rule_case, mask_of, run_rule, split_over_clusters
from sparse_kernels import SelectionTap, TapPoint, _cluster_launch, _select_cluster, coverage_rule, top_k_rule
from sparse_kernels._dispatch import INTERPRETED

RULES = {"gamma": coverage_rule, "top_k": top_k_rule}

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters for the interpreter; nothing on a GPU."""
    if INTERPRETED:
        simulate_clusters(monkeypatch)


def select(
    case: RuleCase, name: str, size: int, tap: TapPoint | None = None, short: int = 0, **options: int
) -> SimpleNamespace:
    """`launch_select_cluster` into poisoned buffers; by default all rows are split."""
    log_mass, seq_lens, targets = case.tensors()
    out = poisoned_outputs(case)
    _select_cluster.launch_select_cluster(
        log_mass,
        seq_lens,
        targets,
        name == "top_k",
        case.page_size,
        case.block_size,
        case.sink_tokens,
        case.window_tokens,
        case.min_context,
        out.lists,
        out.counts,
        poisoned(*out.lists.shape),
        out.total,
        out.mask,
        tap,
        size,
        short=short,
        **options,
    )
    return out


def poisoned_outputs(case: RuleCase) -> SimpleNamespace:
    batch, kv_heads, _, capacity = case.log_mass.shape
    return SimpleNamespace(
        lists=poisoned(batch, kv_heads, capacity, dtype=torch.int32),
        counts=poisoned(batch, kv_heads, dtype=torch.int32),
        mask=poisoned(batch, kv_heads, capacity, dtype=torch.uint8),
        total=torch.full((kv_heads,), 7, dtype=torch.int64, device=DEVICE),
    )


def reference(case: RuleCase, name: str, impl: str = "torch") -> SimpleNamespace:
    """The rule's own lists, without clusters."""
    log_mass, seq_lens, targets = case.tensors()
    out = poisoned_outputs(case)
    with _cluster_launch.without_clusters():
        RULES[name](
            log_mass,
            seq_lens,
            **{name: targets},
            group="average",
            page_size=case.page_size,
            block_size=case.block_size,
            sink_tokens=case.sink_tokens,
            window_tokens=case.window_tokens,
            min_context=case.min_context,
            block_lists=out.lists,
            block_counts=out.counts,
            scratch=poisoned(*out.lists.shape),
            kept_total=out.total,
            kept_mask=out.mask,
            impl=impl,
        )
    return out


def assert_same(case: RuleCase, got: SimpleNamespace, expected: SimpleNamespace, moved: float = 0.0) -> None:
    """Lists, counts, masks and totals agree, but for the share `moved` of a row's blocks, and a swapped pair if it is
    not 0, which a rounding may move; nothing else was written."""
    poison = poisoned(1, dtype=torch.int32).item()
    capacity = case.log_mass.shape[3]
    for b in range(len(case.lengths)):
        blocks = case.blocks(b)
        for h in range(case.kv_heads):
            count = int(got.counts[b, h])
            row = got.lists[b, h].tolist()
            assert row[count:] == [poison] * (capacity - count), "entries beyond the count were written"
            assert row[:count] == sorted(set(row[:count])), "not ascending and unique"
            wanted = set(expected.lists[b, h, : int(expected.counts[b, h])].tolist())
            allowed = 2 + moved * blocks if moved else 0
            assert len(set(row[:count]) ^ wanted) <= allowed, (case.lengths[b], case.targets[b])
            mask = got.mask[b, h].cpu()
            assert mask[:blocks].tolist() == mask_of(row[:count], blocks).int().tolist()
            room = -blocks % 16 if capacity % 16 == 0 else 0
            assert ((mask[blocks : blocks + room] == 0xA5) | (mask[blocks : blocks + room] == 0)).all()
            assert (mask[blocks + room :] == 0xA5).all(), "the mask beyond the row was written"
    assert (got.total - 7).tolist() == got.counts.sum(0).tolist()


def ragged(name: str, seed: int, capacity: int, batch: int = 6, kv_heads: int = 1, **options: Any) -> RuleCase:
    """Rows of random lengths, the last three empty, of one block, and full."""
    rng = torch.Generator().manual_seed(seed)
    lengths = [int(torch.randint(1, capacity * 8 + 1, (), generator=rng)) for _ in range(batch - 3)]
    choices = [0.3, 0.9, 0.99, 1 - 1e-4, 0.0] if name == "gamma" else [1.0, 7.0, 0.25, 0.9, 30.0]
    targets = [choices[int(torch.randint(0, len(choices), (), generator=rng))] for _ in range(batch)]
    chosen: dict[str, Any] = {"sink_tokens": 8, "window_tokens": 20, "group_size": 3, **options}
    return make_rule_case(
        [*lengths, 0, 5, capacity * 8], targets, capacity=capacity, kv_heads=kv_heads, seed=seed, **chosen
    )


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ties": {"levels": 2},
    "one level": {"levels": 1},
    "flat": {"spread": 0.05, "sink_tokens": 0, "window_tokens": 0},
    "steep": {"spread": 8.0},
    "one head": {"group_size": 1},
    "seven heads": {"group_size": 7},
    "sixteen heads": {"group_size": 16, "sink_tokens": 100},
    "minimum context": {"min_context": 150},
    "two KV heads": {"kv_heads": 2},
}


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("options", list(CASES.values()), ids=list(CASES))
@interpreted
def test_one_segment_equals_the_reference(name: str, options: dict[str, Any]) -> None:
    for seed, capacity in enumerate((45, 48)):
        case = ragged(name, seed, capacity, **options)
        assert_same(case, select(case, name, 1), reference(case, name))


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("options", list(CASES.values()), ids=list(CASES))
@interpreted
@pytest.mark.usefixtures("clusters")
def test_segments_equal_the_reference(name: str, options: dict[str, Any]) -> None:
    """Segments of 16 blocks; rows end in any of them."""
    case = ragged(name, 3, 120, batch=4, **options)
    assert_same(case, select(case, name, 8, thresholds=8, warps=4), reference(case, name))


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("options", [{}, {"levels": 2}, {"min_context": 150}, {"group_size": 7}])
@interpreted
@pytest.mark.usefixtures("clusters")
def test_short_rows_stay_with_one_program(name: str, options: dict[str, Any]) -> None:
    """Beside long ones: rows of no block, of one, at the border, and beyond it."""
    lengths = [0, 5, 63 * 8, 64 * 8, 64 * 8 + 1, 90 * 8]
    targets = [0.9, 0.9, 0.8, 0.5, 0.8, 0.9] if name == "gamma" else [7.0, 7.0, 9.0, 0.5, 30.0, 0.25]
    chosen: dict[str, Any] = {"sink_tokens": 8, "window_tokens": 20, "group_size": 3, **options}
    for capacity in (96, 91):
        case = make_rule_case(lengths, targets, capacity=capacity, kv_heads=1, **chosen)
        assert_same(case, select(case, name, 8, short=64, thresholds=8, warps=4), reference(case, name))


def test_segments_hold_what_a_server_fills() -> None:
    """Rows of 131,072 tokens have room for a page more."""
    size = _select_cluster.segment_size
    assert [size(capacity, 16) for capacity in (8128, 8192, 8196, 8320, 8324)] == [512, 512, 512, 512, 1024]
    assert [size(capacity, 8) for capacity in (1, 128, 129, 131, 4100)] == [16, 16, 16, 32, 512]


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("short", [0, 32])
@interpreted
@pytest.mark.usefixtures("clusters")
def test_rows_longer_than_all_segments_stay_with_one_program(name: str, short: int) -> None:
    lengths = [127 * 8, 128 * 8, 128 * 8 + 1, 129 * 8, 130 * 8, 30 * 8]
    targets = [0.9, 0.8, 0.5, 0.8, 0.9, 0.7] if name == "gamma" else [7.0, 9.0, 0.5, 30.0, 0.25, 5.0]
    case = make_rule_case(lengths, targets, capacity=130, kv_heads=1, sink_tokens=8, window_tokens=20, min_context=300)
    assert _select_cluster.segment_size(130, 8) * 8 == 128
    assert_same(case, select(case, name, 8, short=short, thresholds=8, warps=4), reference(case, name))


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@interpreted
@pytest.mark.usefixtures("clusters")
def test_a_row_without_valid_shares_keeps_all(name: str, value: float) -> None:
    case = make_rule_case([320, 320, 320], [0.5, 0.5, 0.5], kv_heads=1)
    # In one segment, in all of another, and in one head of the whole row.
    case.log_mass[0, 0, 1, 7] = value
    case.log_mass[1, 0, 2, 16:32] = value
    case.log_mass[2, 0, 0] = value
    got = select(case, name, 8)
    assert_same(case, got, reference(case, name))
    kept_all = got.counts[:, 0] == 40
    assert kept_all.tolist() == ([False, False, True] if value == -float("inf") else [True] * 3)


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.usefixtures("clusters")
def test_equal_blocks_are_equal_in_all_segments(name: str) -> None:
    """Ties take the lower index even where segments have other maxima."""
    size = 8 if INTERPRETED else device_clusters()
    targets = [0.3, 0.5, 0.9] if name == "gamma" else [20.0, 50.0, 100.0]
    case = make_rule_case([1024] * 3, targets, capacity=128, group_size=4, kv_heads=1)
    case.log_mass[:] = torch.tensor([0.3, -1.7, 2.9, 5.1], device=DEVICE)[:, None]
    for block, higher in ((3, 1.3), (20, 2.77), (40, 0.111), (70, 3.3)):
        case.log_mass[:, :, :, block] += higher
    got = select(case, name, size)
    assert_same(case, got, reference(case, name))


@interpreted
@pytest.mark.usefixtures("clusters")
def test_a_target_that_is_no_number_keeps_all() -> None:
    case = make_rule_case([320, 320], [float("nan"), 1.0], kv_heads=1)
    assert select(case, "gamma", 8).counts.tolist() == [[40], [40]]


@interpreted
@pytest.mark.usefixtures("clusters")
def test_forced_blocks_alone_may_do() -> None:
    case = make_rule_case([320, 320], [0.01, 0.02], sink_tokens=80, window_tokens=80, levels=1, kv_heads=1)
    got = select(case, "gamma", 8)
    assert_same(case, got, reference(case, "gamma"))
    assert got.counts.tolist() == [[20], [20]]


@pytest.mark.parametrize("name", list(RULES))
@interpreted
@pytest.mark.usefixtures("clusters")
def test_rules_hand_clusters_what_they_were_given(name: str) -> None:
    """Through the public operation, each of whose arguments matters here."""
    targets = [0.6, 0.9, 0.8] if name == "gamma" else [12.0, 0.4, 9.0]
    case = make_rule_case(
        [320, 301, 90], targets, page_size=32, sink_tokens=20, window_tokens=50, min_context=100, seed=3
    )
    total = torch.zeros(2, dtype=torch.int64)
    with split_over_clusters(8):
        got = run_rule(RULES[name], name, case, "triton", kept_total=total)
    assert got == run_rule(RULES[name], name, case, "torch")
    assert total.tolist() == [sum(len(row[h]) for row in got) for h in range(2)]


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize("short", [0, 64])
@pytest.mark.usefixtures("clusters")
def test_the_tap_gets_the_whole_list(name: str, armed: bool, short: int) -> None:
    size = 8 if INTERPRETED else device_clusters()
    case = make_rule_case([320, 301], [0.8 if name == "gamma" else 9.0] * 2)
    tap = SelectionTap.create(kv_heads=2, group_size=3, head_dim=8, capacity=40, dtype=torch.float16, device=DEVICE)
    tap.block_lists.fill_(-9)
    if armed:
        tap.arm(3, 11)
    q = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)).to(torch.float16).to(DEVICE)
    got = select(case, name, size, TapPoint(tap, 3, q, first_row=10), short)
    if not armed:
        assert (tap.block_lists == -9).all()
        assert tap.seq_len.item() == 0
        return
    assert tap.seq_len.item() == 301
    assert torch.equal(tap.q, q[1])
    assert torch.equal(tap.block_counts, got.counts[1])
    for h, count in enumerate(got.counts[1].tolist()):
        assert torch.equal(tap.block_lists[h, :count], got.lists[1, h, :count])
        assert (tap.block_lists[h, count:] == -9).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("capacity", [1, 40, 48, 512, 4095, 8128, 8196, 16384])
def test_clusters_choose_what_single_blocks_choose(name: str, capacity: int) -> None:
    device_clusters()
    for size in _cluster_launch.cluster_sizes(torch.device(DEVICE)):
        if _select_cluster.segment_size(capacity, size) > _select_cluster.MAX_SEGMENT:
            continue
        for seed, options in enumerate(({}, {"levels": 4}, {"group_size": 16}, {"spread": 0.2, "group_size": 1})):
            case = ragged(name, seed, capacity, kv_heads=2, **options)
            # A count of ties is exact either way; of random shares a rounding may move one.
            moved = 0.0 if "levels" in options and name == "top_k" else 1e-3
            expected = reference(case, name, "triton")
            for short in {0, min(capacity, _select_cluster.SHORT_ROW)}:
                assert_same(case, select(case, name, size, short=short), expected, moved)


@pytest.mark.gpu
def test_every_length_of_a_row() -> None:
    size = device_clusters()
    for first in range(0, 300, 30):
        lengths = [blocks * 8 for blocks in range(first, first + 30)]
        case = make_rule_case(lengths, [0.9] * 30, capacity=304, levels=3, sink_tokens=8, window_tokens=16, kv_heads=1)
        for short in (0, 128):
            assert_same(case, select(case, "gamma", size, short=short), reference(case, "gamma", "triton"), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("thresholds", "warps"), [(8, 4), (16, 4), (8, 8), (32, 8), (16, 16)])
def test_thresholds_and_warps_do_not_matter(thresholds: int, warps: int) -> None:
    device_clusters()
    case = ragged("gamma", 5, 2048, kv_heads=2, levels=5)
    for size in _cluster_launch.cluster_sizes(torch.device(DEVICE)):
        got = select(case, "gamma", size, thresholds=thresholds, warps=warps)
        assert_same(case, got, reference(case, "gamma", "triton"), 1e-6)


@pytest.mark.gpu
def test_launches_in_a_row_and_replays_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many launches, each on the heels of the one before, with other kernels beside them, eagerly and in a graph."""
    device_clusters()
    cases = [ragged("gamma", seed, capacity, kv_heads=1) for seed, capacity in enumerate((8128, 304, 2048, 8128))]
    for case in cases:
        # Made once: a graph that is captured cannot copy to the device.
        made = case.tensors()
        monkeypatch.setattr(case, "tensors", lambda made=made: made)
    sizes = _cluster_launch.cluster_sizes(torch.device(DEVICE))
    pairs = [(case, sizes[i % len(sizes)]) for i, case in enumerate(cases)]
    expected = [select(case, "gamma", size, short=1024) for case, size in pairs]
    torch.cuda.synchronize()
    beside = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(50):
        with torch.cuda.stream(beside):
            a = torch.nn.functional.normalize(a @ a)
        got = [select(case, "gamma", size, short=1024) for case, size in pairs]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = [select(case, "gamma", size, short=1024) for case, size in pairs]
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    for wanted, eager, replayed in zip(expected, got, captured, strict=True):
        for name in ("lists", "counts", "mask", "total"):
            assert torch.equal(getattr(wanted, name), getattr(eager, name)), name
            assert torch.equal(getattr(wanted, name), getattr(replayed, name)), name


@pytest.mark.gpu
def test_the_rules_take_clusters_for_few_rows() -> None:
    device_clusters()
    sizes = _cluster_launch.cluster_sizes(torch.device(DEVICE))
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for rows in (1, 8, 16, 32, 64):
        expected = next((size for size in sizes if rows * size <= processors), 1)
        assert _select_cluster.chosen_size(torch.empty(rows, 1, 4, 2049, device=DEVICE)) == expected
        assert _select_cluster.chosen_size(torch.empty(rows, 1, 4, 2048, device=DEVICE)) == 1
    beyond = torch.empty(1, 1, 1, sizes[0] * _select_cluster.MAX_SEGMENT * 3 // 2, device=DEVICE)
    assert _select_cluster.chosen_size(beyond) == 1
    with _cluster_launch.without_clusters():
        assert _select_cluster.chosen_size(torch.empty(1, 1, 4, 2049, device=DEVICE)) == 1
