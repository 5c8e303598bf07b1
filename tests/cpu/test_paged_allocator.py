"""The paged allocator's torch methods against a model of single slots, and against SGLang's own Triton kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sparse import cpu
from sglang_sparse.cpu import paged_allocator


def original(*_: Any, **__: Any) -> None:
    raise AssertionError("the original must not be called on a CPU")


class Allocator:
    """What the hooks use of SGLang's ``PagedTokenToKVPoolAllocator``."""

    device = "cpu"
    debug_mode = True

    def __init__(self, num_pages: int, page_size: int, need_sort: bool) -> None:
        self.page_size = page_size
        self.need_sort = need_sort
        self.free_pages = torch.arange(1, num_pages + 1)
        self.release_pages = torch.empty(0, dtype=torch.int64)

    def merge_and_sort_free(self) -> None:
        self.free_pages = torch.cat((self.free_pages, self.release_pages)).sort().values
        self.release_pages = torch.empty(0, dtype=torch.int64)

    def free(self, pages: list[int]) -> None:
        freed = torch.tensor(pages, dtype=torch.int64)
        if self.need_sort:
            self.release_pages = torch.cat((freed, self.release_pages))
        else:
            self.free_pages = torch.cat((freed, self.free_pages))


class Model:
    """Requests as lists of slots, grown by one token at a time."""

    def __init__(self, num_pages: int, page_size: int, need_sort: bool) -> None:
        self.allocator = Allocator(num_pages, page_size, need_sort)
        self.page_size = page_size
        self.requests: list[list[int]] = []

    def expected(self, growing: list[tuple[int, int]], free: list[int]) -> list[int] | None:
        """The slots that ``growing`` (request, number of tokens) must get; their pages are taken out of ``free``."""
        slots: list[int] = []
        for index, count in growing:
            row = list(self.requests[index])
            for _ in range(count):
                if len(row) % self.page_size == 0:
                    if not free:
                        return None
                    row.append(free.pop(0) * self.page_size)
                else:
                    row.append(row[-1] + 1)
                slots.append(row[-1])
        return slots

    def grow(self, growing: list[tuple[int, int]], *, decode: bool) -> None:
        before = [len(self.requests[index]) for index, _ in growing]
        after = [length + count for length, (_, count) in zip(before, growing, strict=True)]
        last = [self.requests[index][-1] if self.requests[index] else -1 for index, _ in growing]
        prefix_lens, seq_lens, last_loc = torch.tensor(before), torch.tensor(after), torch.tensor(last)
        total = sum(count for _, count in growing)

        allocator = self.allocator
        pressed = len(growing) if decode else total // self.page_size + len(growing) + 1
        free = allocator.free_pages.tolist()
        if allocator.need_sort and pressed > len(free):
            free = sorted(free + allocator.release_pages.tolist())
        untouched = list(free)
        expected = self.expected(growing, free)
        if decode:
            slots = paged_allocator.alloc_decode(original, allocator, seq_lens, seq_lens, last_loc)
        else:
            slots = paged_allocator.alloc_extend(
                original, allocator, prefix_lens, prefix_lens, seq_lens, seq_lens, last_loc, total
            )

        if expected is None:
            assert slots is None
            assert allocator.free_pages.tolist() == untouched
            return
        assert slots is not None
        assert slots.dtype == torch.int64
        assert slots.tolist() == expected
        assert allocator.free_pages.tolist() == free
        given_out = iter(expected)
        for index, count in growing:
            self.requests[index] += [next(given_out) for _ in range(count)]
        self.check()

    def release(self, index: int) -> None:
        self.allocator.free(sorted({slot // self.page_size for slot in self.requests.pop(index)}))
        self.check()

    def check(self) -> None:
        """Every page is free or belongs to one request, whose tokens lie in it at their positions; page 0 to none."""
        owned: list[int] = []
        for row in self.requests:
            pages = [slot // self.page_size for slot in row[:: self.page_size]]
            assert all(
                slot == pages[i // self.page_size] * self.page_size + i % self.page_size for i, slot in enumerate(row)
            )
            owned += pages
        pages = owned + self.allocator.free_pages.tolist() + self.allocator.release_pages.tolist()
        assert 0 not in pages
        assert len(set(pages)) == len(pages)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([2, 4, 16]), need_sort=st.booleans())
def test_any_sequence_of_events_hands_out_the_slots_of_the_model(
    data: st.DataObject, page_size: int, need_sort: bool
) -> None:
    model = Model(data.draw(st.integers(0, 24), "pages"), page_size, need_sort)
    for _ in range(data.draw(st.integers(1, 12), "events")):
        event = data.draw(st.sampled_from(["extend", "decode", "release"]))
        old = len(model.requests)
        if event == "release":
            if old:
                model.release(data.draw(st.integers(0, old - 1)))
        elif event == "decode":
            # Empty requests do not decode: SGLang prefills at least one token first.
            ready = [i for i in range(old) if model.requests[i]]
            chosen = data.draw(st.permutations(ready)) if ready else []
            if chosen:
                model.grow([(i, 1) for i in chosen], decode=True)
        else:
            model.requests += [[] for _ in range(data.draw(st.integers(0, 3), "new"))]
            chosen = data.draw(st.permutations(range(len(model.requests))))
            counts = data.draw(st.lists(st.integers(0, 3 * page_size + 1), min_size=len(chosen), max_size=len(chosen)))
            if chosen:
                model.grow(list(zip(chosen, counts, strict=True)), decode=False)


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 31, 32])
@pytest.mark.parametrize("count", [0, 1, 14, 15, 16, 17, 33, 48])
def test_page_borders(prefix: int, count: int) -> None:
    model = Model(num_pages=8, page_size=16, need_sort=False)
    model.requests = [[], []]
    model.grow([(0, prefix), (1, 1)], decode=False)
    model.grow([(0, count), (1, 1)], decode=False)
    if prefix + count:
        for _ in range(17):
            model.grow([(0, 1), (1, 1)], decode=True)


def test_exactly_the_last_pages_can_be_taken() -> None:
    model = Model(num_pages=3, page_size=16, need_sort=False)
    model.requests = [[], []]
    model.grow([(0, 33)], decode=False)
    assert len(model.allocator.free_pages) == 0
    model.grow([(1, 1)], decode=False)
    assert model.requests[1] == []
    model.grow([(0, 15)], decode=False)
    assert len(model.requests[0]) == 48
    model.grow([(0, 1)], decode=True)
    assert len(model.requests[0]) == 48


def test_int32_lengths_and_locations() -> None:
    allocator = Allocator(4, 16, need_sort=False)
    one, two = torch.tensor([0], dtype=torch.int32), torch.tensor([17], dtype=torch.int32)
    slots = paged_allocator.alloc_extend(original, allocator, one, one, two, two, one - 1, extend_num_tokens=17)
    assert slots is not None
    assert slots.dtype == torch.int64
    assert slots.tolist() == list(range(16, 33))


def test_debug_mode_refuses_a_last_location_that_contradicts_the_length() -> None:
    allocator = Allocator(4, 16, need_sort=False)
    lens = torch.tensor([5])
    with pytest.raises(AssertionError):
        paged_allocator.alloc_decode(original, allocator, lens, lens, torch.tensor([20]))
    with pytest.raises(AssertionError):
        paged_allocator.alloc_extend(original, allocator, lens, lens, lens + 1, lens + 1, torch.tensor([21]), 1)


def test_other_devices_keep_the_original() -> None:
    allocator = Allocator(4, 16, need_sort=False)
    allocator.device = "cuda"
    calls: list[tuple[Any, ...]] = []

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((args, kwargs))
        return torch.zeros(1)

    lens = torch.tensor([5])
    paged_allocator.alloc_decode(kernel, allocator, lens, lens, last_loc=lens)
    paged_allocator.alloc_extend(kernel, allocator, lens, lens, lens, lens, lens, 0, num_new_pages=0)
    assert [(len(args), list(kwargs)) for args, kwargs in calls] == [(3, ["last_loc"]), (7, ["num_new_pages"])]


def test_equal_to_the_kernels_of_sglang() -> None:
    """In a process of its own, which runs SGLang's kernels in Triton's interpreter."""
    script = Path(__file__).with_name("compare_paged_allocators.py")
    environment = os.environ | cpu.environment() | {"TRITON_INTERPRET": "1", "SGLANG_DEBUG_MEMORY_POOL": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal after 800 events" in done.stdout
