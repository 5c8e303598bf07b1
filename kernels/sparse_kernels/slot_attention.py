"""Decode attention over listed blocks that lie in the slots of a cache, in open pages, or in pinned host memory.

The same plan, tiles and combine as `sparse_attention`; only where a token's key and value are found differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from . import _attention_plan as plan
from . import attention_tail
from ._attention_plan import AttentionWorkspace, check_attention
from ._checks import check_contiguous, check_dtype, check_inner_contiguous, check_rows, check_shape
from ._dispatch import use_triton
from ._slot_kernel import slot_attention_kernel
from .attention_tail import AttentionTail
from .block_store import check_open_pages
from .combine import LOG2_E, combine
from .host_block import PACKED, check_host_layer, unpack_blocks
from .slot_maps import OPEN
from .sparse_attention import sparse_attention_reference


@dataclass(frozen=True)
class SlotSources:
    """Where keys and values of one layer lie; blocks are `[2, block_size, D]`, keys before values.

    Attributes:
        hot: `[Hkv, S, 2, block_size, D]`, contiguous, on the GPU.
        slot_map: `[Hkv, pool blocks]` int32, contiguous: the slot of each pool block, negative if it is in none.
        host: `[P, Hkv, blocks_per_page, 2, block_size, D]`, contiguous, or of float8 blocks (`host_block`); a CUDA
            kernel needs it pinned.
        open_k, open_v: `[rows * page_size, Hkv, D]`, contiguous: the pages that requests' last tokens are in.
        open_rows: `[>=B]` int32: the row of each request in them.
    """

    hot: torch.Tensor
    slot_map: torch.Tensor
    host: torch.Tensor
    open_k: torch.Tensor
    open_v: torch.Tensor
    open_rows: torch.Tensor

    def check(self, out: torch.Tensor, kv_heads: int, page_size: int, block_size: int) -> None:
        """Raises ValueError unless the tensors fit together and an attention that writes `out [B, Hq, D]`."""
        batch, _, head_dim = out.shape
        check_host_layer(self.host, page_size, block_size, kv_heads, head_dim)
        check_shape("sources.hot", self.hot, kv_heads, None, 2, block_size, head_dim)
        check_contiguous("sources.hot", self.hot)
        check_open_pages(self.open_k, self.open_v, page_size, kv_heads, head_dim)
        check_dtype("sources.host", self.host, out.dtype, PACKED)
        for name in ("hot", "open_k", "open_v"):
            check_dtype(f"sources.{name}", getattr(self, name), out.dtype)
        check_shape("sources.slot_map", self.slot_map, kv_heads, self.host.shape[0] * self.host.shape[2])
        check_dtype("sources.slot_map", self.slot_map, torch.int32)
        check_contiguous("sources.slot_map", self.slot_map)
        check_rows("sources.open_rows", self.open_rows, batch)
        check_dtype("sources.open_rows", self.open_rows, torch.int32)


def slot_attention_reference(
    q: torch.Tensor,
    sources: SlotSources,
    locations: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
    *,
    scale: float,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    tail: AttentionTail | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """`slot_attention` in plain torch: lays the listed blocks of each request out as a pool of its own, and attends to
    that with `sparse_attention_reference`, so that results equal those of a pool that holds everything, bit for bit."""
    kv_heads, _, _, _, head_dim = sources.hot.shape
    per_page = page_size // block_size
    for b, length in enumerate(seq_lens[: q.shape[0]].tolist()):
        one = slice(b, b + 1)
        pages = -(-length // page_size)
        laid_out = torch.zeros((2, pages * per_page, block_size, kv_heads, head_dim), dtype=q.dtype, device=q.device)
        for h in range(kv_heads):
            count = min(int(block_counts[b, h]), -(-length // block_size))
            location, listed = locations[b, h, :count], block_lists[b, h, :count].long()
            closed = location > OPEN
            location, listed = location[closed], listed[closed]
            block = -1 - location.clamp_max(-1)
            slot = torch.where(location >= 0, location, sources.slot_map[h, block.long()])
            found = slot >= 0
            laid_out[:, listed[found], :, h] = sources.hot[h, slot[found].long()].transpose(0, 1)
            rest = block[~found].long().to(sources.host.device)
            direct = sources.host[rest // per_page, h, rest % per_page]
            if direct.dtype == PACKED:
                direct = unpack_blocks(direct, block_size, q.dtype)
            laid_out[:, listed[~found], :, h] = direct.transpose(0, 1).to(q.device)
        keys, values = laid_out.flatten(1, 2)
        if length:
            first = (pages - 1) * page_size
            opened = slice(
                int(sources.open_rows[b]) * page_size, int(sources.open_rows[b]) * page_size + length - first
            )
            keys[first:length], values[first:length] = sources.open_k[opened], sources.open_v[opened]
        own_tail = None
        if tail is not None:
            means = tail.value_means[page_table[b, :pages].long()]
            own_tail = AttentionTail(tail.log_mass[one], tail.kept_mask[one], means)
        sparse_attention_reference(
            q[one],
            keys,
            values,
            torch.arange(pages, dtype=torch.int32, device=q.device)[None],
            seq_lens[one],
            block_lists[one],
            block_counts[one],
            scale=scale,
            page_size=page_size,
            block_size=block_size,
            out=out[one],
            tail=own_tail,
            lse=None if lse is None else lse[one],
        )


def slot_attention(
    q: torch.Tensor,
    sources: SlotSources,
    locations: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_lists: torch.Tensor,
    block_counts: torch.Tensor,
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
    """`sparse_attention` for keys and values that are cached in slots.

    A listed block is read from its slot, also if this step's `slot_assign` gave it one; from the request's open page;
    or, if there was no slot for it, directly from host memory. Results do not depend on which.

    Args:
        q, page_table, seq_lens, block_lists, block_counts, scale, out, tail, lse: as in `sparse_attention`; lists have
            to be there. Tokens in each listed block of the request's last page are read up to its length.
        sources: where the layer's keys and values lie.
        locations: `[>=B, Hkv, N]` int32, what `slot_lookup` wrote for these lists.
        page_size, block_size: tokens.
        workspace: see `AttentionWorkspace.create`; may be None where the torch reference runs.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size does not fit; the message names the argument.
    """
    # The open pages are a pool of the kind that these checks are for.
    check_attention(
        q,
        sources.open_k,
        sources.open_v,
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
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = sources.open_k.shape[1]
    sources.check(out, num_kv_heads, page_size, block_size)
    check_rows("locations", locations, batch, ndim=3)
    check_shape("locations", locations, None, *block_lists.shape[1:])
    check_dtype("locations", locations, torch.int32)
    check_inner_contiguous("locations", locations)
    if tail is not None:
        tail.check(out, num_kv_heads, page_size, block_size)
    sizes = {"page_size": page_size, "block_size": block_size}
    if not use_triton(impl, q):
        slot_attention_reference(
            q,
            sources,
            locations,
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
    slot_attention_kernel[(workspace.num_programs,)](
        q,
        sources.hot,
        sources.host,
        sources.open_k,
        sources.open_v,
        sources.slot_map,
        sources.open_rows,
        locations,
        page_table,
        seq_lens,
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
        *locations.stride()[:2],
        page_table.stride(0),
        out.stride(0),
        out.stride(1),
        *tail_strides,
        sources.slot_map.shape[1],
        sources.hot.shape[1],
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
        ROWS=plan.PLAN_ROWS,
        FLOAT8=sources.host.dtype == PACKED,
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
