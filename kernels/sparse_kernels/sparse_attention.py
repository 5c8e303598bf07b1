"""Decode attention of one query token per request over listed blocks of a paged KV pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _attention_plan as plan
from . import attention_tail
from ._attention_plan import AttentionWorkspace, check_attention
from ._dispatch import use_triton
from .attention_tail import AttentionTail, add_tail_reference
from .combine import LN_2, LOG2_E, combine

__all__ = ["AttentionTail", "AttentionWorkspace", "sparse_attention", "sparse_attention_reference"]


def sparse_attention_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_lists: torch.Tensor | None,
    block_counts: torch.Tensor | None,
    *,
    scale: float,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    workspace: AttentionWorkspace | None = None,
    tail: AttentionTail | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """`sparse_attention` in plain torch; `workspace` is not used.

    Requests of which every row keeps all its blocks take one `scaled_dot_product_attention` call in the pool's dtype,
    which is also what SGLang's `torch_native` backend computes. Other requests gather the listed tokens of each KV
    head and accumulate in fp32.
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    group = num_q_heads // num_kv_heads
    counts = None if block_counts is None else block_counts[:batch].tolist()
    if lse is None and tail is not None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if lse is not None:
        lse.fill_(float("-inf"))
    for b, seq_len in enumerate(seq_lens[:batch].tolist()):
        if seq_len <= 0:
            out[b].zero_()
            continue
        num_blocks = -(-seq_len // block_size)
        row_counts = [num_blocks] * num_kv_heads if counts is None else [min(c, num_blocks) for c in counts[b]]
        pages = page_table[b, : -(-seq_len // page_size)].long()
        if block_lists is None or min(row_counts) == num_blocks:
            offsets = torch.arange(page_size, device=q.device)
            slots = (pages[:, None] * page_size + offsets).flatten()[:seq_len]
            attended = torch.nn.functional.scaled_dot_product_attention(
                q[b, None, :, None, :],
                k_pool[slots].transpose(0, 1)[None],
                v_pool[slots].transpose(0, 1)[None],
                scale=scale,
                enable_gqa=group > 1,
            )
            out[b].copy_(attended[0, :, 0])
            if lse is not None:
                queries = q[b].view(num_kv_heads, group, head_dim).float()
                lse[b] = (queries @ k_pool[slots].permute(1, 2, 0).float() * scale).logsumexp(-1).flatten()
            continue
        widest = max(row_counts)
        if widest == 0:
            out[b].zero_()
            continue
        row_count = torch.tensor(row_counts, device=q.device)[:, None]
        listed = torch.arange(widest, device=q.device) < row_count
        blocks = torch.where(listed, block_lists[b, :, :widest], 0).long()
        tokens = blocks[:, :, None] * block_size + torch.arange(block_size, device=q.device)
        valid = (listed[:, :, None] & (tokens < seq_len)).flatten(1)
        # Token 0 stands in for entries that do not exist: it is always readable, and its weight becomes zero.
        tokens = torch.where(valid, tokens.flatten(1), 0)
        slots = pages[tokens // page_size] * page_size + tokens % page_size
        heads = torch.arange(num_kv_heads, device=q.device)[:, None]
        keys = k_pool[slots, heads].float()
        values = v_pool[slots, heads].float()
        scores = q[b].view(num_kv_heads, group, head_dim).float() @ keys.transpose(1, 2) * scale
        scores.masked_fill_(~valid[:, None], float("-inf"))
        weights = scores.softmax(-1)
        attended = torch.where(row_count[:, :, None] > 0, weights @ values, 0.0)
        out[b].copy_(attended.view(num_q_heads, head_dim))
        if lse is not None:
            lse[b] = scores.logsumexp(-1).flatten()
    if tail is not None:
        assert block_counts is not None
        assert lse is not None
        sizes = {"page_size": page_size, "block_size": block_size}
        add_tail_reference(tail, page_table, seq_lens, block_counts, **sizes, out=out, lse=lse)


@triton.jit
def _load_blocks(list_ptr, listed, limit, BLOCK_SIZE: tl.constexpr, HAS_LISTS: tl.constexpr):
    """The block of each listed token; 0 from `limit` on."""
    if HAS_LISTS:
        return tl.load(list_ptr + listed // BLOCK_SIZE, mask=listed < limit, other=0)
    return listed // BLOCK_SIZE


@triton.jit
def _load_pages(page_row_ptr, tokens, listed, limit, seq_len, PAGE_SIZE: tl.constexpr):
    """The physical page of each listed token; 0 where the token does not exist."""
    return tl.load(page_row_ptr + tokens // PAGE_SIZE, mask=(listed < limit) & (tokens < seq_len), other=0)


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _sparse_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    seq_lens_ptr,
    lists_ptr,
    counts_ptr,
    out_ptr,
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    lse_ptr,
    mass_ptr,
    kept_ptr,
    means_ptr,
    scale_log2,
    q_stride_b,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    page_table_stride,
    lists_stride_b,
    lists_stride_h,
    out_stride_b,
    out_stride_h,
    mass_stride_b,
    mass_stride_h,
    mass_stride_g,
    kept_stride_b,
    kept_stride_h,
    num_rows,
    num_programs,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    CELLS_PER_PAGE: tl.constexpr,
    TILE_CELLS: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    cursor, end, row, before = plan.program_share(
        program,
        num_programs,
        num_rows,
        num_kv_heads,
        seq_lens_ptr,
        counts_ptr,
        BLOCK_SIZE,
        PAGE_SIZE,
        TILE,
        TAIL_TILE,
        HAS_LISTS,
        ROWS,
    )
    queries = tl.arange(0, 16)
    channels = tl.arange(0, HEAD_DIM_PAD)
    tile_tokens = tl.arange(0, TILE)
    in_head = channels < HEAD_DIM
    q_mask = (queries < GROUP)[:, None] & in_head[None, :]

    while cursor < end:
        blocks, list_tiles, tail_tiles = plan.row_tiles(
            row, num_rows, num_kv_heads, seq_lens_ptr, counts_ptr, BLOCK_SIZE, PAGE_SIZE, TILE, TAIL_TILE, HAS_LISTS
        )
        tiles = list_tiles + tail_tiles
        first_tile = cursor - before
        stop_tile = tl.minimum(end - before, tiles)
        if first_tile < stop_tile:
            b = (row // num_kv_heads).to(tl.int64)
            h = row % num_kv_heads
            seq_len = tl.load(seq_lens_ptr + b)
            heads = h * GROUP + queries
            q = tl.load(
                q_ptr + b * q_stride_b + heads[:, None] * q_stride_h + channels[None, :], mask=q_mask, other=0.0
            )
            page_row_ptr = page_table_ptr + b * page_table_stride
            list_ptr = lists_ptr
            if HAS_LISTS:
                list_ptr = lists_ptr + b * lists_stride_b + h * lists_stride_h
            k_head_ptr = k_ptr + h * k_stride_h
            v_head_ptr = v_ptr + h * v_stride_h
            stop_list = tl.minimum(stop_tile, list_tiles)
            limit = tl.minimum(stop_list * TILE, blocks * BLOCK_SIZE)

            highest = tl.full((16,), float("-inf"), tl.float32)
            weight_sum = tl.zeros((16,), tl.float32)
            acc = tl.zeros((16, HEAD_DIM_PAD), tl.float32)
            # List entries are loaded two tiles ahead and pages one tile ahead, so that the chain list -> page -> key
            # costs one tile's time only at a row's start.
            listed = first_tile * TILE + tile_tokens
            blocks_now = _load_blocks(list_ptr, listed, limit, BLOCK_SIZE, HAS_LISTS)
            blocks_next = _load_blocks(list_ptr, listed + TILE, limit, BLOCK_SIZE, HAS_LISTS)
            tokens = blocks_now * BLOCK_SIZE + listed % BLOCK_SIZE
            pages = _load_pages(page_row_ptr, tokens, listed, limit, seq_len, PAGE_SIZE)
            for tile in range(first_tile, stop_list):
                listed = tile * TILE + tile_tokens
                valid = (listed < limit) & (tokens < seq_len)
                slots = pages.to(tl.int64) * PAGE_SIZE + tokens % PAGE_SIZE
                kv_mask = valid[:, None] & in_head[None, :]
                k = tl.load(k_head_ptr + slots[:, None] * k_stride_t + channels[None, :], mask=kv_mask, other=0.0)
                v = tl.load(v_head_ptr + slots[:, None] * v_stride_t + channels[None, :], mask=kv_mask, other=0.0)
                # `tokens` is carried, not the blocks: the pipeliner skips loops that pass an argument on unchanged.
                tokens = blocks_next * BLOCK_SIZE + (listed + TILE) % BLOCK_SIZE
                pages = _load_pages(page_row_ptr, tokens, listed + TILE, limit, seq_len, PAGE_SIZE)
                blocks_next = _load_blocks(list_ptr, listed + 2 * TILE, limit, BLOCK_SIZE, HAS_LISTS)

                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
                scores = tl.where(valid[None, :], scores, float("-inf"))
                new_highest = tl.maximum(highest, tl.max(scores, 1))
                # While nothing was valid the maximum is -inf: shift by 0 so that no -inf - -inf arises.
                shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
                decay = tl.exp2(highest - shift)
                weights = tl.exp2(scores - shift[:, None])
                weight_sum = weight_sum * decay + tl.sum(weights, 1)
                acc = acc * decay[:, None]
                acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
                highest = new_highest

            if TAIL_TILE:  # noqa: SIM102 - a condition of the compiler's
                if stop_tile > list_tiles:
                    highest, weight_sum, acc = attention_tail.add_tiles(
                        highest,
                        weight_sum,
                        acc,
                        tl.maximum(first_tile - list_tiles, 0),
                        stop_tile - list_tiles,
                        seq_len // PAGE_SIZE,
                        h,
                        num_kv_heads,
                        mass_ptr + b * mass_stride_b + h * mass_stride_h,
                        mass_stride_g,
                        kept_ptr + b * kept_stride_b + h * kept_stride_h,
                        means_ptr,
                        page_row_ptr,
                        GROUP,
                        HEAD_DIM,
                        PAGE_SIZE,
                        BLOCK_SIZE,
                        CELLS_PER_PAGE,
                        TILE_CELLS,
                    )

            if (first_tile == 0) & (stop_tile == tiles):
                result = acc / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]
                tl.store(
                    out_ptr + b * out_stride_b + heads[:, None] * out_stride_h + channels[None, :],
                    result.to(out_ptr.dtype.element_ty),
                    mask=q_mask,
                )
                if lse_ptr is not None:
                    row_lse = (highest + tl.log2(weight_sum)) * LN_2
                    tl.store(lse_ptr + b * num_kv_heads * GROUP + heads, row_lse, mask=queries < GROUP)
            else:
                slot = 2 * program + (first_tile == 0).to(tl.int32)
                parts = slot * GROUP + queries
                tl.store(partial_out_ptr + parts[:, None] * HEAD_DIM + channels[None, :], acc, mask=q_mask)
                tl.store(partial_max_ptr + parts, highest, mask=queries < GROUP)
                tl.store(partial_sum_ptr + parts, weight_sum, mask=queries < GROUP)
        # Past `end` if a later program goes on with this row.
        before += tiles
        cursor = before
        row += 1


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_lists: torch.Tensor | None,
    block_counts: torch.Tensor | None,
    *,
    scale: float,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    workspace: AttentionWorkspace | None,
    tail: AttentionTail | None = None,
    lse: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Attention of one query token per request over the listed blocks of its KV.

    `out[b, h * G + g] = sum_t softmax_t(scale * q[b, h * G + g] . k[t, h]) v[t, h]` over the tokens `t < seq_lens[b]`
    in the blocks listed for row `(b, h)`; fp32 accumulation, online softmax (FlashAttention) split over programs
    (FlashDecoding). Two launches, the second being `combine`; grids and buffers do not depend on data, nothing is
    allocated and the host is not synchronised, so the call can be captured in a CUDA graph.

    Args:
        q: `[B, Hq, D]`, `D` in 64, 96, 128, 256, `Hq = Hkv * G` with `G` in 1..16; last dimension contiguous.
        k_pool, v_pool: `[slots, Hkv, D]` in q's dtype (fp16, bf16, fp32), last dimension contiguous.
        page_table: `[>=B, max_pages]` int32, physical pages.
        seq_lens: `[>=B]` int32; requests of length 0 get zeros.
        block_lists: `[>=B, Hkv, N]` int32, ascending and unique; blocks beyond the request are skipped. None attends to
            every block.
        block_counts: `[>=B, Hkv]` int32, contiguous; None exactly if `block_lists` is. Rows with count 0 get zeros.
        scale: factor on `q . k`.
        page_size: tokens of a page: 16, 32, 64 or 128.
        block_size: tokens of a block: 8, 16, 32 or 64; divides `page_size`.
        out: `[B, Hq, D]` in q's dtype, last dimension contiguous; written completely.
        workspace: see `AttentionWorkspace.create`; may be None where the torch reference runs.
        tail: what stands for the blocks that are not listed, see `AttentionTail`; None drops them. Needs lists.
        lse: `[B, Hq]` fp32, contiguous, output: log of the sum over the row's listed tokens of `exp(scale * q . k)`,
            and of the masses of its tail; -inf for empty rows; optional.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size does not fit; the message names the argument.
    """
    check_attention(
        q, k_pool, v_pool, page_table, seq_lens, block_lists, block_counts, page_size, block_size, out, workspace, lse
    )
    if tail is not None:
        if block_lists is None:
            raise ValueError("tail is given without block_lists: there is nothing that it could stand for")
        tail.check(out, k_pool.shape[1], page_size, block_size)
    if not use_triton(impl, q):
        sparse_attention_reference(
            q,
            k_pool,
            v_pool,
            page_table,
            seq_lens,
            block_lists,
            block_counts,
            scale=scale,
            page_size=page_size,
            block_size=block_size,
            out=out,
            workspace=workspace,
            tail=tail,
            lse=lse,
        )
        return
    if workspace is None:
        raise ValueError("workspace is needed by the Triton kernels")
    batch, num_q_heads, head_dim = q.shape
    if batch == 0:
        return
    num_kv_heads = k_pool.shape[1]
    config = plan.tile_config(head_dim, k_pool.dtype)
    tail_tile = 0 if tail is None else tail.tile_tokens(page_size)
    tail_tensors = (None, None, None) if tail is None else (tail.log_mass, tail.kept_mask, tail.value_means)
    tail_strides = (0,) * 5 if tail is None else (*tail.log_mass.stride()[:3], *tail.kept_mask.stride()[:2])
    _sparse_attention_kernel[(workspace.num_programs,)](
        q,
        k_pool,
        v_pool,
        page_table,
        seq_lens,
        block_lists,
        block_counts,
        out,
        workspace.partial_out,
        workspace.partial_max,
        workspace.partial_sum,
        lse,
        *tail_tensors,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        v_pool.stride(0),
        v_pool.stride(1),
        page_table.stride(0),
        *((0, 0) if block_lists is None else block_lists.stride()[:2]),
        out.stride(0),
        out.stride(1),
        *tail_strides,
        batch * num_kv_heads,
        workspace.num_programs,
        num_kv_heads,
        GROUP=num_q_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        PAGE_SIZE=page_size,
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        TAIL_TILE=tail_tile,
        CELLS_PER_PAGE=1 if tail is None else tail.value_means.shape[2],
        TILE_CELLS=attention_tail.TILE_CELLS,
        HAS_LISTS=block_lists is not None,
        ROWS=plan.PLAN_ROWS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    combine(
        workspace,
        seq_lens,
        block_counts,
        block_size=block_size,
        tile=config.tile,
        page_size=page_size,
        tail_tile=tail_tile,
        out=out,
        lse=lse,
        impl="triton",
    )
