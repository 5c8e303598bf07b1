"""Rows split over clusters of thread blocks: the search of both rules in segments, and the launch.

Without a GPU nothing runs as a cluster. There the search runs in one segment, and in several whose programs exchange
what they have in Python.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from factories import DEVICE, poisoned
from rule_cases import RuleCase, make_rule_case, mask_of
from sparse_kernels import (
    SelectionTap,
    TapPoint,
    _cluster_exchange,
    _cluster_launch,
    _cluster_search,
    _select_cluster,
    coverage_rule,
    prepare_clusters,
    top_k_rule,
)
from sparse_kernels._dispatch import INTERPRETED
from triton.runtime.interpreter import TensorHandle, interpreter_builder

RULES = {"gamma": coverage_rule, "top_k": top_k_rule}

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")


class Clusters:
    """Runs the programs of a grid in clusters, in the interpreter: in threads of which one runs at a time, up to its
    next exchange."""

    def __init__(self, program: Callable[..., None]) -> None:
        self.program = program

    def run(self, arguments: dict[str, Any]) -> None:
        """In place of the interpreted kernel, which the interpreter calls for one program after another."""
        self.size = int(arguments["K"])
        self.first = interpreter_builder.grid_idx[0]
        if self.first % self.size != 0:
            return
        self.buffers: list[list[Any]] = [[None] * self.size, [None] * self.size]
        self.batons = [threading.Semaphore(0) for _ in range(self.size)]
        self.exchanges = [0] * self.size
        self.ended: list[BaseException | None] = []
        threads = [threading.Thread(target=self._run_one, args=(k, arguments), daemon=True) for k in range(self.size)]
        for thread in threads:
            thread.start()
        self.batons[0].release()
        for thread in threads:
            thread.join()
        for error in self.ended:
            if error is not None:
                raise error

    def _run_one(self, k: int, arguments: dict[str, Any]) -> None:
        error: BaseException | None = None
        try:
            self._await_turn(k)
            self.program(**arguments)
        except BaseException as raised:
            error = raised
        self.ended.append(error)
        self.batons[(k + 1) % self.size].release()

    def _await_turn(self, k: int) -> None:
        self.batons[k].acquire()
        self.running = k
        interpreter_builder.set_grid_idx(self.first + k, 0, 0)

    def exchange(self, mine: Any, buffer: Any, number: Any, K: Any, MOST: Any) -> Any:
        """In place of `_cluster_exchange.exchange`."""
        k = self.running
        turn = number.handle.data.item() if isinstance(number, tl.tensor) else int(getattr(number, "value", number))
        buffer = self.buffers[turn % 2]
        buffer[k] = mine.handle.data.copy()
        self.exchanges[k] += 1
        self.batons[(k + 1) % self.size].release()
        self._await_turn(k)
        assert min(self.exchanges) >= self.exchanges[k], "a program of the cluster ended before the others met"
        return tl.tensor(TensorHandle(np.stack(buffer), tl.int64), tl.block_type(tl.int64, [self.size, len(buffer[k])]))


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters for the interpreter; nothing on a GPU."""
    if not INTERPRETED:
        return
    kernel = _select_cluster._select_cluster_kernel
    made = Clusters(kernel.rewrite())

    def run(**arguments: Any) -> None:
        made.run(arguments)

    # By these the interpreter knows the arguments.
    run.__annotations__ = made.program.__annotations__
    run.__signature__ = inspect.signature(made.program)  # type: ignore[attr-defined]
    monkeypatch.setitem(kernel.rewritten_fn, kernel.fn, run)
    for module in (_cluster_exchange, _cluster_search):
        monkeypatch.setattr(module, "exchange", made.exchange)
    monkeypatch.setattr(_select_cluster, "announce_start", lambda: None)
    monkeypatch.setattr(_select_cluster, "await_start", lambda: None)
    monkeypatch.setattr(_select_cluster, "exchange_buffer", lambda K, T: 0)


def select(case: RuleCase, name: str, size: int, tap: TapPoint | None = None, **options: int) -> SimpleNamespace:
    """`launch_select_cluster` into poisoned buffers."""
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
        out.total,
        out.mask,
        tap,
        size,
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
    """Lists, counts, masks and totals agree, but for the share `moved` of a row's blocks, and one more if it is not 0,
    which a rounding may move; nothing else was written."""
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
            allowed = 1 + moved * blocks if moved else 0
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
@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.usefixtures("clusters")
def test_the_tap_gets_the_whole_list(name: str, armed: bool) -> None:
    size = 8 if INTERPRETED else require_clusters()
    case = make_rule_case([320, 301], [0.8 if name == "gamma" else 9.0] * 2)
    tap = SelectionTap.create(kv_heads=2, group_size=3, head_dim=8, capacity=40, dtype=torch.float16, device=DEVICE)
    tap.block_lists.fill_(-9)
    if armed:
        tap.arm(3, 11)
    q = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)).to(torch.float16).to(DEVICE)
    got = select(case, name, size, TapPoint(tap, 3, q, first_row=10))
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


def require_clusters() -> int:
    sizes = _cluster_launch.cluster_sizes(torch.device(DEVICE))
    if not sizes:
        pytest.skip("this device, or Triton, has no clusters")
    return sizes[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("capacity", [1, 40, 48, 512, 4095, 8128, 16384, 32768])
def test_clusters_choose_what_single_blocks_choose(name: str, capacity: int) -> None:
    require_clusters()
    for size in _cluster_launch.cluster_sizes(torch.device(DEVICE)):
        if capacity > size * _select_cluster.MAX_SEGMENT:
            continue
        for seed, options in enumerate(({}, {"levels": 4}, {"group_size": 16}, {"spread": 0.2, "group_size": 1})):
            case = ragged(name, seed, capacity, kv_heads=2, **options)
            # Ties are exact either way; of random shares a rounding may move one.
            moved = 0.0 if "levels" in options else 1e-3
            assert_same(case, select(case, name, size), reference(case, name, "triton"), moved)


@pytest.mark.gpu
def test_every_length_of_a_row() -> None:
    size = require_clusters()
    for first in range(0, 300, 30):
        lengths = [blocks * 8 for blocks in range(first, first + 30)]
        case = make_rule_case(lengths, [0.9] * 30, capacity=304, levels=3, sink_tokens=8, window_tokens=16, kv_heads=1)
        assert_same(case, select(case, "gamma", size), reference(case, "gamma", "triton"))


@pytest.mark.gpu
@pytest.mark.parametrize(("thresholds", "warps"), [(8, 4), (16, 4), (8, 8), (32, 8), (16, 16)])
def test_thresholds_and_warps_do_not_matter(thresholds: int, warps: int) -> None:
    require_clusters()
    case = ragged("gamma", 5, 2048, kv_heads=2, levels=5)
    for size in _cluster_launch.cluster_sizes(torch.device(DEVICE)):
        got = select(case, "gamma", size, thresholds=thresholds, warps=warps)
        assert_same(case, got, reference(case, "gamma", "triton"))


@pytest.mark.gpu
def test_launches_in_a_row_and_replays_choose_alike() -> None:
    """Many launches, each on the heels of the one before, with other kernels beside them, eagerly and in a graph."""
    require_clusters()
    cases = [ragged("gamma", seed, capacity, kv_heads=1) for seed, capacity in enumerate((8128, 304, 2048, 8128))]
    sizes = _cluster_launch.cluster_sizes(torch.device(DEVICE))
    pairs = [(case, sizes[i % len(sizes)]) for i, case in enumerate(cases)]
    expected = [select(case, "gamma", size) for case, size in pairs]
    torch.cuda.synchronize()
    beside = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(50):
        with torch.cuda.stream(beside):
            a = torch.nn.functional.normalize(a @ a)
        got = [select(case, "gamma", size) for case, size in pairs]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = [select(case, "gamma", size) for case, size in pairs]
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    for wanted, eager, replayed in zip(expected, got, captured, strict=True):
        for name in ("lists", "counts", "mask", "total"):
            assert torch.equal(getattr(wanted, name), getattr(eager, name)), name
            assert torch.equal(getattr(wanted, name), getattr(replayed, name)), name


@pytest.mark.gpu
def test_the_rules_take_clusters_for_few_rows() -> None:
    sizes = _cluster_launch.cluster_sizes(torch.device(DEVICE))
    if not sizes:
        pytest.skip("this device, or Triton, has no clusters")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for rows in (1, 8, 16, 32, 64):
        expected = next((size for size in sizes if rows * size <= processors), 1)
        assert _select_cluster.chosen_size(torch.empty(rows, 1, 4, 256, device=DEVICE)) == expected
    beyond = torch.empty(1, 1, 1, sizes[0] * _select_cluster.MAX_SEGMENT + 1, device=DEVICE)
    assert _select_cluster.chosen_size(beyond) == 1
    with _cluster_launch.without_clusters():
        assert _select_cluster.chosen_size(torch.empty(1, 1, 4, 256, device=DEVICE)) == 1


@pytest.mark.gpu
def test_nothing_is_found_out_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cluster_launch, "_sizes_of_device", {})
    device = torch.device(DEVICE)
    seen = torch.zeros(1, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert _cluster_launch.cluster_sizes(device) == ()
        seen += 1
    assert _cluster_launch._sizes_of_device == {}
    prepare_clusters(device)
    assert list(_cluster_launch._sizes_of_device) == [torch.cuda.current_device()]


class Compiled:
    """As much of a kernel that Triton compiled as a launch looks at."""

    def __init__(self, packed: Any, num_ctas: int = 1) -> None:
        self.metadata = SimpleNamespace(num_warps=4, num_ctas=num_ctas, shared=128)
        self.packed_metadata = packed
        self.run = object()


def test_a_copy_of_the_kernel_is_launched_as_clusters() -> None:
    compiled = Compiled((4, 1, 128))
    copied = _cluster_launch._as_clusters(compiled, 8)
    assert copied.packed_metadata == (4, 8, 128)
    assert copied.run is compiled.run
    assert compiled.packed_metadata == (4, 1, 128)
    assert _cluster_launch._as_clusters(compiled, 8) is copied
    assert _cluster_launch._as_clusters(compiled, 16).packed_metadata == (4, 16, 128)


@pytest.mark.parametrize("compiled", [Compiled((4, 1, 128, 0)), Compiled((4, 2, 128), 2), Compiled({"num_ctas": 1})])
def test_unknown_metadata_are_refused(compiled: Compiled) -> None:
    with pytest.raises(RuntimeError, match="not known here"):
        _cluster_launch._as_clusters(compiled, 8)


@pytest.mark.parametrize(
    ("version", "capability", "reasons", "sizes", "said"),
    [
        ("13.0", (9, 0), {}, (16, 8), "in clusters of up to 16 thread blocks on a GPU"),
        ("13.0", (12, 0), {16: "too large"}, (8,), "without clusters of 16 thread blocks on a GPU: too large"),
        ("13.0", (9, 0), {16: "odd", 8: "odd"}, (), "without clusters of 8 thread blocks on a GPU: odd"),
        ("13.0", (8, 9), {}, (), "without thread block clusters: a GPU has none"),
        (None, (9, 4), {}, (), "without thread block clusters: a GPU has none"),
    ],
)
def test_a_device_is_asked_once_and_the_answer_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str | None,
    capability: tuple[int, int],
    reasons: dict[int, str],
    sizes: tuple[int, ...],
    said: str,
) -> None:
    asked = []

    def why_not(size: int) -> str:
        asked.append(size)
        return reasons.get(size, "")

    monkeypatch.setattr(_cluster_launch, "INTERPRETED", False)
    monkeypatch.setattr(_cluster_launch, "_sizes_of_device", {})
    monkeypatch.setattr(_cluster_launch, "_why_not", why_not)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: _cluster_launch.without_clusters())
    with caplog.at_level(logging.INFO, "sparse_kernels"):
        for _ in range(2):
            assert _cluster_launch.cluster_sizes(torch.device("cuda:0")) == sizes
    assert said in caplog.text
    assert len(caplog.records) == len(set(caplog.messages)) <= 2
    assert asked in ([], list(_cluster_launch.SIZES))


def test_no_clusters_without_a_gpu() -> None:
    prepare_clusters("cpu")
    assert _cluster_launch.cluster_sizes(torch.device("cpu")) == ()
    assert _select_cluster.chosen_size(torch.empty(1, 1, 1, 8)) == 1
