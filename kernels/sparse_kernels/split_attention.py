"""Decode attention over listed blocks whose keys are split (`split_keys`) and whose values are a paged pool.

The same plan, softmax, tail and combine as `sparse_attention`. A block of a closed page is scored with the query folded
into its page's bounds, `q . k = q . low + (q * step) . n / 256`, so that no key is ever put together: the ten bits of n
are the mantissa of a float16, which tensor cores multiply. The tokens of a row's open page come last, from their keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from . import _attention_plan as plan
from . import attention_tail
from ._attention_plan import AttentionWorkspace, check_attention
from ._dispatch import INTERPRETED, use_triton
from ._score_tile import padded_group
from ._split_kernel import split_attention_kernel
from .attention_tail import AttentionTail
from .combine import LOG2_E, combine
from .sparse_attention import sparse_attention_reference
from .split_keys import SplitKeys, reconstruct

_MAX_OPEN_TILE = 64


def split_attention_reference(
    q: torch.Tensor,
    keys: SplitKeys,
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
    tail: AttentionTail | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """`split_attention` in plain torch: lays each request's keys and values out as a pool of its own, in fp32, and
    attends to that with `sparse_attention_reference`."""
    for b, length in enumerate(seq_lens[: q.shape[0]].tolist()):
        one = slice(b, b + 1)
        closed, opened = divmod(max(length, 0), page_size)
        pages = page_table[b, : -(-length // page_size)].long()
        full = pages[:closed]
        split = reconstruct(keys.codes[full], keys.low_step[full], keys.residual[full]).transpose(1, 2).flatten(0, 1)
        own_keys = v_pool.new_zeros((len(pages) * page_size, *v_pool.shape[1:]), dtype=torch.float32)
        own_keys[: len(split)] = split
        first = int(keys.open_rows[b]) * page_size
        own_keys[len(split) : len(split) + opened] = keys.open_keys[first : first + opened].float()
        values = v_pool.unflatten(0, (-1, page_size))[pages].flatten(0, 1).float()
        own_tail = tail
        if tail is not None:
            means = tail.value_means[pages].float()
            own_tail = replace(tail, log_mass=tail.log_mass[one], kept_mask=tail.kept_mask[one], value_means=means)
        attended = torch.empty_like(q[one], dtype=torch.float32)
        sparse_attention_reference(
            q[one].float(),
            own_keys,
            values,
            torch.arange(len(pages), dtype=torch.int32, device=q.device)[None],
            seq_lens[one],
            None if block_lists is None else block_lists[one],
            None if block_counts is None else block_counts[one],
            scale=scale,
            page_size=page_size,
            block_size=block_size,
            out=attended,
            tail=own_tail,
            lse=None if lse is None else lse[one],
        )
        out[one] = attended.to(out.dtype)


def split_attention(
    q: torch.Tensor,
    keys: SplitKeys,
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
    """`sparse_attention` for split keys.

    Args:
        q, v_pool, page_table, seq_lens, block_lists, block_counts, scale, out, tail, lse: as in `sparse_attention`.
        keys: the layer's keys; those of a request's open page, if `seq_len` is no multiple of the page size, are read
            from its row of open pages, all others from their page.
        page_size, block_size: tokens.
        workspace: see `AttentionWorkspace.create`; may be None where the torch reference runs.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size does not fit; the message names the argument.
    """
    # The open pages are a pool of the kind that these checks are for.
    check_attention(
        q,
        keys.open_keys,
        v_pool,
        page_table,
        seq_lens,
        block_lists,
        block_counts,
        page_size,
        block_size,
        out,
        workspace,
        lse,
    )
    keys.check(out, page_size)
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = v_pool.shape[1]
    group_size = num_q_heads // num_kv_heads
    if tail is not None:
        if block_lists is None:
            raise ValueError("tail is given without block_lists: there is nothing that it could stand for")
        tail.check(out, num_kv_heads, page_size, block_size)
    sizes = {"page_size": page_size, "block_size": block_size}
    if not use_triton(impl, q):
        split_attention_reference(
            q,
            keys,
            v_pool,
            page_table,
            seq_lens,
            block_lists,
            block_counts,
            scale=scale,
            **sizes,
            out=out,
            tail=tail,
            lse=lse,
        )
        return
    if workspace is None:
        raise ValueError("workspace is needed by the Triton kernels")
    if batch == 0:
        return
    config = plan.tile_config(head_dim, q.dtype)
    tail_tile = 0 if tail is None else tail.tile_tokens(page_size)
    tail_tensors = (None, None, None) if tail is None else (tail.log_mass, tail.kept_mask, tail.value_means)
    tail_strides = (0,) * 5 if tail is None else (*tail.log_mass.stride()[:3], *tail.kept_mask.stride()[:2])
    split_attention_kernel[(workspace.num_programs,)](
        q,
        keys.codes,
        keys.low_step.view(torch.int16),
        keys.residual,
        keys.open_keys,
        keys.open_rows,
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
        G=group_size,
        GROUP=padded_group(group_size),
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        SUB=max(16, triton.next_power_of_2(head_dim // 4)),
        PAGE_SIZE=page_size,
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        OPEN_TILE=min(page_size, _MAX_OPEN_TILE),
        TAIL_TILE=tail_tile,
        CELLS_PER_PAGE=1 if tail is None else tail.value_means.shape[2],
        TILE_CELLS=attention_tail.TILE_CELLS,
        HAS_LISTS=block_lists is not None,
        HALF=q.dtype != torch.float32,
        ASM=not INTERPRETED and q.dtype != torch.float32,
        ROWS=plan.PLAN_ROWS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    combine(
        workspace,
        seq_lens,
        block_counts,
        **sizes,
        tile=config.tile,
        tail_tile=tail_tile,
        out=out,
        lse=lse,
        impl="triton",
    )
