"""SGLang's paged KV allocator in torch, for CPU servers with a page size above one.

Older SGLang releases launch Triton kernels in ``PagedTokenToKVPoolAllocator.alloc_extend`` and ``alloc_decode``,
whatever the device is. The functions here are AROUND hooks for these two methods: on a CPU they hand out exactly the
slots that the kernels would, elsewhere they call the original.
"""

from collections.abc import Callable
from typing import Any

import torch

from sglang_sparse.sglang_compat import allocates_without_triton

__all__ = ["alloc_decode", "alloc_extend"]


def alloc_extend(original_fn: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Around ``PagedTokenToKVPoolAllocator.alloc_extend``: slots for the new tokens of a prefill batch."""
    if torch.device(self.device).type != "cpu" or allocates_without_triton(self):
        result: torch.Tensor | None = original_fn(self, *args, **kwargs)
        return result
    return _alloc_extend(self, *args, **kwargs)


def alloc_decode(original_fn: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Around ``PagedTokenToKVPoolAllocator.alloc_decode``: one slot for the next token of each request."""
    if torch.device(self.device).type != "cpu" or allocates_without_triton(self):
        result: torch.Tensor | None = original_fn(self, *args, **kwargs)
        return result
    return _alloc_decode(self, *args, **kwargs)


def _alloc_extend(
    self: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> torch.Tensor | None:
    if self.debug_mode:
        assert torch.all((last_loc + 1) % self.page_size == prefix_lens % self.page_size)
    # The original's estimate, so that pages are merged, and hence handed out, in the same order.
    if self.need_sort and extend_num_tokens // self.page_size + len(prefix_lens) + 1 > len(self.free_pages):
        self.merge_and_sort_free()
    slots = _take(self, prefix_lens, seq_lens, last_loc, num_new_pages)
    assert slots is None or len(slots) == extend_num_tokens
    return slots


def _alloc_decode(
    self: Any, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
) -> torch.Tensor | None:
    if self.debug_mode:
        assert torch.all((last_loc + 2) % self.page_size == seq_lens % self.page_size)
    if self.need_sort and len(seq_lens) > len(self.free_pages):
        self.merge_and_sort_free()
    return _take(self, seq_lens - 1, seq_lens, last_loc, None)


def _take(
    self: Any, prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor, num_new_pages: int | None
) -> torch.Tensor | None:
    """Slots of the positions ``prefix_lens[i]`` to ``seq_lens[i]`` of each request, all requests one after the other.

    Positions in the page that holds ``last_loc[i]`` follow it; the others get the first free pages, in order. Returns
    None, and takes nothing, if there are too few.
    """
    page_size = self.page_size
    prefix_lens, seq_lens, last_loc = prefix_lens.long(), seq_lens.long(), last_loc.long()
    pages_before = (prefix_lens + page_size - 1) // page_size
    new_pages = (seq_lens + page_size - 1) // page_size - pages_before
    needed = int(new_pages.sum())
    assert num_new_pages is None or num_new_pages == needed
    if needed > len(self.free_pages):
        return None

    lengths = seq_lens - prefix_lens
    request = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(request)) - (lengths.cumsum(0) - lengths)[request] + prefix_lens[request]
    nth_new_page = position // page_size - pages_before[request]
    in_new_page = nth_new_page >= 0
    first_new_page = (new_pages.cumsum(0) - new_pages)[request]

    slots = (last_loc + 1 - prefix_lens)[request] + position
    page = self.free_pages[(first_new_page + nth_new_page)[in_new_page]]
    slots[in_new_page] = page * page_size + position[in_new_page] % page_size

    if self.debug_mode:
        assert len(torch.unique(slots)) == len(slots)
    self.free_pages = self.free_pages[needed:]
    return slots
