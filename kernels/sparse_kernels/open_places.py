"""Where the new tokens of a decode step go, if pages that are not full are kept apart from the pool."""

import torch
import triton
import triton.language as tl

from ._checks import PAGE_SIZES, check_choice, check_dtype, check_inner_contiguous, check_rows, check_shape
from ._dispatch import use_triton

_INTS = (torch.int32, torch.int64)


def open_places_reference(
    places: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    pool_slots: torch.Tensor,
    open_slots: torch.Tensor,
    open_rows: torch.Tensor,
    closing_pages: torch.Tensor,
    closing_rows: torch.Tensor,
    page_table: torch.Tensor | None = None,
) -> None:
    """Torch reference of `open_places`."""
    batch = len(rows)
    lengths = seq_lens[:batch].tolist()
    for tensor in (pool_slots, open_slots, closing_pages, closing_rows):
        tensor.fill_(-1)
    open_rows[:batch] = rows
    for b, length in enumerate(lengths):
        if length == 0:
            continue
        pool_slots[b] = places[b]
        open_slots[b] = rows[b] * page_size + (length - 1) % page_size
        if length % page_size == 0:
            closing_pages[b] = places[b] // page_size
            closing_rows[b] = rows[b]
        elif page_table is not None:
            page_table[b, length // page_size] = rows[b]


@triton.jit(do_not_specialize=["batch", "given", "max_requests"])
def _open_places_kernel(
    places,
    rows,
    seq_lens,
    pool_slots,
    open_slots,
    open_rows,
    closing_pages,
    closing_rows,
    page_table,
    batch,
    given,
    max_requests,
    page_table_stride,
    PAGE: tl.constexpr,
    TABLE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    b = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    known = b < batch
    length = tl.load(seq_lens + b, mask=known, other=0).to(tl.int32)
    row = tl.load(rows + b, mask=known, other=0).to(tl.int32)
    used = length > 0
    place = tl.load(places + b, mask=used & (b < given), other=0).to(tl.int64)
    closes = used & (length % PAGE == 0)
    every = b < max_requests
    tl.store(open_rows + b, row, mask=known)
    tl.store(pool_slots + b, tl.where(used, place, -1), mask=every)
    tl.store(open_slots + b, tl.where(used, row * PAGE + (length - 1) % PAGE, -1), mask=every)
    tl.store(closing_pages + b, tl.where(closes, (place // PAGE).to(tl.int32), -1), mask=every)
    tl.store(closing_rows + b, tl.where(closes, row, -1), mask=every)
    if TABLE:
        entry = page_table + b.to(tl.int64) * page_table_stride + length // PAGE
        tl.store(entry, row, mask=used & ~closes)


def _open_places_triton(
    places: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    pool_slots: torch.Tensor,
    open_slots: torch.Tensor,
    open_rows: torch.Tensor,
    closing_pages: torch.Tensor,
    closing_rows: torch.Tensor,
    page_table: torch.Tensor | None = None,
) -> None:
    chunk = 128
    _open_places_kernel[(triton.cdiv(len(pool_slots), chunk),)](
        places,
        rows,
        seq_lens,
        pool_slots,
        open_slots,
        open_rows,
        closing_pages,
        closing_rows,
        pool_slots if page_table is None else page_table,
        len(rows),
        len(places),
        len(pool_slots),
        0 if page_table is None else page_table.stride(0),
        PAGE=page_size,
        TABLE=page_table is not None,
        CHUNK=chunk,
        num_warps=4,
    )


def open_places(
    places: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    pool_slots: torch.Tensor,
    open_slots: torch.Tensor,
    open_rows: torch.Tensor,
    closing_pages: torch.Tensor,
    closing_rows: torch.Tensor,
    page_table: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Writes where each request's new token goes, and which pages it fills.

    A request keeps the tokens of a page that is not full in a row of `page_size` places of its own, its open page.

    Args:
        places: `[<=B]` int32 or int64, the new tokens' places in the pool; at least those of the rows before padding.
        rows: `[B]` int32 or int64, each request's open page. For padded rows any number.
        seq_lens: `[>=B]` int32 or int64, the new token included; 0 for padded rows.
        page_size: tokens in a page.
        pool_slots: `[M]` int64, output: `places`; -1 for padded rows and from B on.
        open_slots: `[M]` int32, output: `rows * page_size + (seq_lens - 1) % page_size`; -1 likewise.
        open_rows: `[M]` int32, output: `rows`; from B on untouched.
        closing_pages: `[M]` int32, output: the pool's page that the new token fills; -1 where it fills none.
        closing_rows: `[M]` int32, output: the open page that it fills; -1 likewise.
        page_table: `[>=B, max_pages]` int32; the entry of each page that is not full gets the request's row. Optional.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    batch, largest = len(rows), len(pool_slots)
    check_choice("page_size", page_size, PAGE_SIZES)
    for name, tensor in (("places", places), ("rows", rows), ("seq_lens", seq_lens)):
        check_shape(name, tensor, None)
        check_dtype(name, tensor, *_INTS)
        check_inner_contiguous(name, tensor)
    check_rows("seq_lens", seq_lens, batch)
    if batch > largest:
        raise ValueError(f"rows has shape [{batch}]; needed: at most {largest}, as in pool_slots")
    for name, tensor, dtype in (
        ("pool_slots", pool_slots, torch.int64),
        ("open_slots", open_slots, torch.int32),
        ("open_rows", open_rows, torch.int32),
        ("closing_pages", closing_pages, torch.int32),
        ("closing_rows", closing_rows, torch.int32),
    ):
        check_shape(name, tensor, largest)
        check_dtype(name, tensor, dtype)
        check_inner_contiguous(name, tensor)
    if page_table is not None:
        check_rows("page_table", page_table, batch, ndim=2)
        check_dtype("page_table", page_table, torch.int32)
        check_inner_contiguous("page_table", page_table)
    run = _open_places_triton if use_triton(impl, pool_slots) else open_places_reference
    run(
        places,
        rows,
        seq_lens,
        page_size=page_size,
        pool_slots=pool_slots,
        open_slots=open_slots,
        open_rows=open_rows,
        closing_pages=closing_pages,
        closing_rows=closing_rows,
        page_table=page_table,
    )
