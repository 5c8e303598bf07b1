"""Copies what one decode step needs from the engine's request table into buffers of its own."""

import torch
import triton
import triton.language as tl

from ._checks import PAGE_SIZES, check_choice, check_dtype, check_inner_contiguous, check_rows, check_shape
from ._dispatch import use_triton


def snapshot_page_table_reference(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    page_table: torch.Tensor,
    seq_lens_out: torch.Tensor,
    closing_pages: torch.Tensor,
) -> None:
    """Torch reference of `snapshot_page_table`."""
    batch = req_pool_indices.shape[0]
    lengths = seq_lens[:batch]
    seq_lens_out[:batch] = lengths
    closing_pages[:batch] = -1
    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        pages = req_to_token[req_pool_indices[b], :length:page_size] // page_size
        page_table[b, : pages.shape[0]] = pages
        if length % page_size == 0:
            closing_pages[b] = pages[-1]


@triton.jit
def _snapshot_page_table_kernel(
    req_to_token,
    req_pool_indices,
    seq_lens,
    page_table,
    seq_lens_out,
    closing_pages,
    req_to_token_stride,
    page_table_stride,
    max_pages,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    b = tl.program_id(0)
    first = tl.program_id(1) * CHUNK
    length = tl.load(seq_lens + b).to(tl.int32)
    pages = tl.minimum((length + PAGE - 1) // PAGE, max_pages)
    if first == 0:
        tl.store(seq_lens_out + b, length)
        if (length == 0) | (length % PAGE != 0):
            tl.store(closing_pages + b, -1)
    if first < pages:
        tokens = req_to_token + tl.load(req_pool_indices + b).to(tl.int64) * req_to_token_stride
        logical = first + tl.arange(0, CHUNK)
        used = logical < pages
        physical = tl.load(tokens + logical * PAGE, mask=used, other=0) // PAGE
        tl.store(page_table + b.to(tl.int64) * page_table_stride + logical, physical, mask=used)
        # The program that holds the last page knows which page closed.
        closes = (logical == pages - 1) & (length % PAGE == 0)
        tl.store(closing_pages + b + tl.zeros_like(logical), physical, mask=closes)


def _snapshot_page_table_triton(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    page_table: torch.Tensor,
    seq_lens_out: torch.Tensor,
    closing_pages: torch.Tensor,
) -> None:
    batch, max_pages = req_pool_indices.shape[0], page_table.shape[1]
    if batch == 0:
        return
    chunk = 256
    _snapshot_page_table_kernel[(batch, triton.cdiv(max_pages, chunk))](
        req_to_token,
        req_pool_indices,
        seq_lens,
        page_table,
        seq_lens_out,
        closing_pages,
        req_to_token.stride(0),
        page_table.stride(0),
        max_pages,
        PAGE=page_size,
        CHUNK=chunk,
        num_warps=2,
    )


def snapshot_page_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    page_table: torch.Tensor,
    seq_lens_out: torch.Tensor,
    closing_pages: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Writes the page table, the lengths and the pages that close in this step.

    `page_table[b, i] = req_to_token[req_pool_indices[b], i * page_size] // page_size` for the pages of row b, which are
    `ceil(seq_lens[b] / page_size)`.

    Args:
        req_to_token: `[R, ctx]` int32, token slots of each request.
        req_pool_indices: `[B]` int32 or int64, rows of `req_to_token`. Not read for rows of length 0.
        seq_lens: `[>=B]` int32 or int64, lengths in tokens, the token of this step included; 0 for padded rows.
        page_size: tokens in a page.
        page_table: `[>=B, max_pages]` int32, output; entries beyond a row's pages stay untouched.
        seq_lens_out: `[>=B]` int32, output; the first B entries.
        closing_pages: `[>=B]` int32, output; the physical page that the current token filled, else -1.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    batch = req_pool_indices.shape[0]
    check_choice("page_size", page_size, PAGE_SIZES)
    check_shape("req_to_token", req_to_token, None, None)
    check_dtype("req_to_token", req_to_token, torch.int32)
    check_inner_contiguous("req_to_token", req_to_token)
    check_rows("req_pool_indices", req_pool_indices, batch)
    check_dtype("req_pool_indices", req_pool_indices, torch.int32, torch.int64)
    check_rows("seq_lens", seq_lens, batch)
    check_dtype("seq_lens", seq_lens, torch.int32, torch.int64)
    check_rows("page_table", page_table, batch, ndim=2)
    check_dtype("page_table", page_table, torch.int32)
    check_inner_contiguous("page_table", page_table)
    for name, tensor in (("seq_lens_out", seq_lens_out), ("closing_pages", closing_pages)):
        check_rows(name, tensor, batch)
        check_dtype(name, tensor, torch.int32)
    run = _snapshot_page_table_triton if use_triton(impl, req_to_token) else snapshot_page_table_reference
    run(
        req_to_token,
        req_pool_indices,
        seq_lens,
        page_size=page_size,
        page_table=page_table,
        seq_lens_out=seq_lens_out,
        closing_pages=closing_pages,
    )
