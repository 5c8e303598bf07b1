"""Random batches for the selection rules, and what must hold of every list they write."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import pytest
import torch
from factories import DEVICE, poisoned
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from oracles import head_shares
from sparse_kernels import TapPoint, _select
from sparse_kernels._cluster_launch import cluster_sizes, without_clusters

CAPACITY = 40
PATHS = ["torch", "triton", "chunked", *(["clusters"] if DEVICE == "cuda" else [])]
"""Reference, kernel with rows in registers, kernel with rows in chunks, and rows split over clusters of thread blocks,
however short they are, where the device has them. `test_select_cluster` has what needs no GPU."""

over_paths = pytest.mark.parametrize("path", PATHS)


def examples(path: str) -> settings:
    """Fewer examples where each costs a second."""
    count = 60 if path == "torch" or DEVICE == "cuda" else 6
    return settings(
        max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )


@dataclass
class RuleCase:
    """Inputs of a rule; log masses beyond a row's blocks, and of rows below `min_context`, are NaN."""

    log_mass: torch.Tensor
    lengths: list[int]
    targets: list[float]
    group: str
    page_size: int
    block_size: int
    sink_tokens: int
    window_tokens: int
    min_context: int

    @property
    def kv_heads(self) -> int:
        return self.log_mass.shape[1]

    def blocks(self, b: int) -> int:
        return -(-self.lengths[b] // self.block_size)

    def forced(self, b: int) -> torch.Tensor:
        """Forced blocks of a row, token by token: `[blocks]` bool."""
        length = self.lengths[b]
        forced = torch.zeros(self.blocks(b), dtype=torch.bool)
        for t in range(length):
            open_page = length % self.page_size and t // self.page_size == length // self.page_size
            if t < self.sink_tokens or t >= length - self.window_tokens or open_page:
                forced[t // self.block_size] = True
        return forced

    def keeps_all(self, b: int, limit: float) -> bool:
        """Whether the row keeps everything by contract; `limit` is 1 for gamma, the row's blocks for top_k."""
        return self.lengths[b] < self.min_context or self.targets[b] >= limit

    def shares(self, b: int, h: int) -> torch.Tensor:
        """`[G, blocks]` float64."""
        return head_shares(self.log_mass[b, h, :, : self.blocks(b)].cpu())

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            self.log_mass,
            torch.tensor([*self.lengths, 77], dtype=torch.int32, device=DEVICE),
            torch.tensor([*self.targets, 0.3], dtype=torch.float32, device=DEVICE),
        )


def make_rule_case(
    lengths: list[int],
    targets: list[float],
    *,
    group: str = "average",
    group_size: int = 3,
    page_size: int = 16,
    block_size: int = 8,
    sink_tokens: int = 0,
    window_tokens: int = 0,
    min_context: int = 0,
    spread: float = 3.0,
    levels: int = 0,
    seed: int = 0,
    capacity: int = CAPACITY,
    kv_heads: int = 2,
) -> RuleCase:
    """Normal log masses of standard deviation `spread`; with `levels`, rounded to that many values and equal over a
    group (ties)."""
    rng = torch.Generator().manual_seed(seed)
    log_mass = torch.randn(len(lengths), kv_heads, group_size, capacity, generator=rng) * spread
    if levels:
        log_mass = (
            (torch.rand(len(lengths), kv_heads, 1, capacity, generator=rng) * levels)
            .floor()
            .repeat(1, 1, group_size, 1)
        )
    for b, length in enumerate(lengths):
        log_mass[b, :, :, -(-length // block_size) :] = float("nan")
        if length < min_context:
            log_mass[b] = float("nan")
    return RuleCase(
        log_mass.to(DEVICE), lengths, targets, group, page_size, block_size, sink_tokens, window_tokens, min_context
    )


def rule_cases(targets: st.SearchStrategy[float]) -> st.SearchStrategy[RuleCase]:
    """Random cases over few compile-time shapes."""

    @st.composite
    def build(draw: st.DrawFn) -> RuleCase:
        page_size, block_size = draw(st.sampled_from([(16, 8), (64, 16)]))
        lengths = draw(st.lists(st.integers(0, CAPACITY * block_size), min_size=1, max_size=3))
        return make_rule_case(
            lengths,
            [draw(targets) for _ in lengths],
            group=draw(st.sampled_from(["average", "every"])),
            group_size=draw(st.sampled_from([1, 3, 4])),
            page_size=page_size,
            block_size=block_size,
            sink_tokens=draw(st.sampled_from([0, 1, 8, 40])),
            window_tokens=draw(st.sampled_from([0, 1, 9, 64])),
            min_context=draw(st.sampled_from([0, 0, 100])),
            spread=draw(st.sampled_from([0.1, 1.0, 3.0, 10.0])),
            levels=draw(st.sampled_from([0, 0, 1, 4])),
            seed=draw(st.integers(0, 10**6)),
            capacity=draw(st.sampled_from([CAPACITY, 48])),
        )

    return build()


@contextmanager
def split_over_clusters(size: int) -> Iterator[None]:
    """While it lasts, rules of group `average` split all rows over clusters of `size` blocks, of whatever lengths."""
    launch = partial(_select.launch_select_cluster, short=0)
    with (
        patch.object(_select, "chosen_size", lambda log_mass: size),
        patch.object(_select, "launch_select_cluster", launch),
    ):
        yield


def device_clusters() -> int:
    """Thread blocks of the largest clusters that the device takes; skips the test if there are none."""
    sizes = cluster_sizes(torch.device(DEVICE))
    if not sizes:
        pytest.skip("this device, or Triton, has no clusters")
    return sizes[0]


def run_rule(
    rule,
    name: str,
    case: RuleCase,
    path: str,
    kept_total: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
    tap: TapPoint | None = None,
) -> list[list[list[int]]]:
    """Runs a rule and returns its lists by request and head, after the checks that hold for every rule.

    `targets` replaces the case's own.
    """
    log_mass, seq_lens, own_targets = case.tensors()
    targets = own_targets if targets is None else targets
    batch, kv_heads, _, capacity = log_mass.shape
    lists = poisoned(batch, kv_heads, capacity, dtype=torch.int32)
    counts = poisoned(batch, kv_heads, dtype=torch.int32)
    kept_mask = poisoned(batch, kv_heads, capacity, dtype=torch.uint8)
    limits = (_select.SINGLE_SIZES, _select.CHUNK)
    if path == "chunked":
        _select.SINGLE_SIZES, _select.CHUNK = (), 32
    try:
        with split_over_clusters(device_clusters()) if path == "clusters" else without_clusters():
            rule(
                log_mass,
                seq_lens,
                **{name: targets},
                group=case.group,
                page_size=case.page_size,
                block_size=case.block_size,
                sink_tokens=case.sink_tokens,
                window_tokens=case.window_tokens,
                min_context=case.min_context,
                block_lists=lists,
                block_counts=counts,
                scratch=poisoned(batch, kv_heads, capacity),
                kept_total=kept_total,
                kept_mask=kept_mask,
                tap=tap,
                impl="torch" if path == "torch" else "triton",
            )
    finally:
        _select.SINGLE_SIZES, _select.CHUNK = limits
    poison = poisoned(1, dtype=torch.int32).item()
    result = []
    for b in range(batch):
        rows = []
        for h in range(kv_heads):
            count = int(counts[b, h])
            assert 0 <= count <= case.blocks(b)
            assert (lists[b, h, count:] == poison).all(), "entries beyond the count were written"
            row = lists[b, h, :count].tolist()
            blocks = case.blocks(b)
            assert kept_mask[b, h, :blocks].tolist() == mask_of(row, blocks).int().tolist(), "the mask is not the list"
            beyond = kept_mask[b, h, blocks:]
            # Rows with room for it may be written up to a multiple of 16.
            room = -blocks % 16 if capacity % 16 == 0 else 0
            assert ((beyond[:room] == 0xA5) | (beyond[:room] == 0)).all(), "the mask marks blocks beyond the row"
            assert (beyond[room:] == 0xA5).all(), "the mask beyond the row was written"
            assert row == sorted(set(row)), "not ascending and unique"
            assert all(0 <= j < case.blocks(b) for j in row), "outside the row"
            assert set(case.forced(b).nonzero().flatten().tolist()) <= set(row), "a forced block is missing"
            assert row or case.lengths[b] == 0, "an empty list for a row that is not empty"
            rows.append(row)
        result.append(rows)
    return result


def mask_of(row: list[int], blocks: int) -> torch.Tensor:
    """A list as `[blocks]` bool."""
    mask = torch.zeros(blocks, dtype=torch.bool)
    mask[row] = True
    return mask


def assert_ties_take_the_lower_index(share: torch.Tensor, kept: torch.Tensor, forced: torch.Tensor) -> None:
    """Among free blocks of equal share, no dropped one comes before a kept one."""
    free = (~forced).nonzero().flatten().tolist()
    for value in share[~forced].unique():
        tied = [bool(kept[j]) for j in free if share[j] == value]
        assert tied == sorted(tied, reverse=True)
