"""Drives two of SGLang's paged allocators through the same events, one with the hooks and one with the kernels.

Not a test module: ``test_paged_allocator.py`` runs it with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sglang_sparse.cpu import paged_allocator

EVENTS = 800
PAGES = 24


class Hooked(PagedTokenToKVPoolAllocator):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("alloc_extend", "alloc_decode"):
            kernel = getattr(PagedTokenToKVPoolAllocator, name)
            setattr(self, name, functools.partial(getattr(paged_allocator, name), kernel, self))


def drive(page_size: int, need_sort: bool, events: int, choose: random.Random) -> None:
    settings = (PAGES * page_size, page_size, torch.bfloat16, "cpu", None, need_sort)
    hooked, plain = Hooked(*settings), PagedTokenToKVPoolAllocator(*settings)
    requests: list[torch.Tensor] = []
    for _ in range(events):
        event = choose.choice(["extend", "decode", "decode", "free"])
        if event == "free" and requests:
            row = requests.pop(choose.randrange(len(requests)))
            hooked.free(row)
            plain.free(row)
        elif event == "decode" and requests:
            seq_lens = torch.tensor([len(row) + 1 for row in requests])
            last_loc = torch.stack([row[-1] for row in requests])
            take(requests, [1] * len(requests), hooked, plain, "alloc_decode", seq_lens, seq_lens, last_loc)
        elif event == "extend":
            new = [torch.empty(0, dtype=torch.int64)] * choose.randint(1, 3)
            rows = [row for row in requests if choose.random() < 0.5] + new
            others = [row for row in requests if all(row is not taken for taken in rows)]
            counts = [choose.randint(1, 3 * page_size) for _ in rows]
            prefix = torch.tensor([len(row) for row in rows])
            seq_lens = prefix + torch.tensor(counts)
            last_loc = torch.tensor([int(row[-1]) if len(row) else -1 for row in rows])
            take(rows, counts, hooked, plain, "alloc_extend", prefix, prefix, seq_lens, seq_lens, last_loc, sum(counts))
            requests = others + [row for row in rows if len(row)]
        assert torch.equal(hooked.free_pages, plain.free_pages)
        assert torch.equal(hooked.release_pages, plain.release_pages)


def take(
    rows: list[torch.Tensor],
    counts: list[int],
    hooked: Any,
    plain: Any,
    method: str,
    *arguments: Any,
) -> None:
    """Calls both and appends the slots to ``rows``.

    Without enough pages the kernels read past the free pages before the allocator says so: then only the hook is asked.
    """
    page_size = plain.page_size
    needed = 0
    for row, count in zip(rows, counts, strict=True):
        needed += -(-(len(row) + count) // page_size) - -(-len(row) // page_size)
    if needed > len(plain.free_pages) + len(plain.release_pages):
        assert getattr(hooked, method)(*arguments) is None
        if plain.need_sort:
            plain.merge_and_sort_free()
        return
    found, expected = getattr(hooked, method)(*arguments), getattr(plain, method)(*arguments)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected), (found, expected)
    for index, piece in enumerate(torch.split(found, counts)):
        rows[index] = torch.cat((rows[index], piece))


def main() -> None:
    choose = random.Random(0)
    for page_size in (16, 64):
        for need_sort in (False, True):
            drive(page_size, need_sort, EVENTS // 4, choose)
    print(f"equal after {EVENTS} events")


if __name__ == "__main__":
    main()
