"""Decode attention over listed blocks that lie in the slots of a cache, in open pages, or in pinned host memory.

The same plan, tiles and combine as `sparse_attention`; only where a token's key and value are found differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _attention_plan as plan
from . import _float8_bits as float8
from . import attention_tail
from ._attention_plan import AttentionWorkspace, check_attention
from ._checks import check_contiguous, check_dtype, check_inner_contiguous, check_rows, check_shape
from ._dispatch import use_triton
from .attention_tail import AttentionTail
from .block_store import check_open_pages
from .combine import LN_2, LOG2_E, combine
from .host_block import PACKED, check_host_layer, unpack_blocks
from .slot_maps import OPEN
from .sparse_attention import sparse_attention_reference

_OPEN: tl.constexpr = tl.constexpr(OPEN)


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


@triton.jit
def _load_locations(location_ptr, listed, limit, BLOCK: tl.constexpr):
    """The location of each listed token's block; 0 from `limit` on, where nothing is loaded from it."""
    return tl.load(location_ptr + listed // BLOCK, mask=listed < limit, other=0)


@triton.jit
def _resolve(location, map_ptr):
    """Slots of blocks that this step gave one take the place of their location."""
    missed = (location < 0) & (location > _OPEN)
    slot = tl.load(map_ptr + (-1 - location), mask=missed, other=-1)
    return tl.where(slot >= 0, slot, location)


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _slot_attention_kernel(
    q_ptr,
    hot_ptr,
    host_ptr,
    open_k_ptr,
    open_v_ptr,
    map_ptr,
    open_rows_ptr,
    locations_ptr,
    page_table_ptr,
    seq_lens_ptr,
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
    locations_stride_b,
    locations_stride_h,
    page_table_stride,
    out_stride_b,
    out_stride_h,
    mass_stride_b,
    mass_stride_h,
    mass_stride_g,
    kept_stride_b,
    kept_stride_h,
    pool_blocks,
    slots,
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
    ROWS: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    BLOCKS_PER_PAGE: tl.constexpr = PAGE_SIZE // BLOCK_SIZE
    UNIT: tl.constexpr = BLOCK_SIZE * HEAD_DIM
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
        True,
        ROWS,
    )
    queries = tl.arange(0, 16)
    channels = tl.arange(0, HEAD_DIM_PAD)
    tile_tokens = tl.arange(0, TILE)
    in_head = channels < HEAD_DIM
    q_mask = (queries < GROUP)[:, None] & in_head[None, :]

    while cursor < end:
        blocks, list_tiles, tail_tiles = plan.row_tiles(
            row, num_rows, num_kv_heads, seq_lens_ptr, counts_ptr, BLOCK_SIZE, PAGE_SIZE, TILE, TAIL_TILE, True
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
            own_map = map_ptr + h.to(tl.int64) * pool_blocks
            own_hot = hot_ptr + h.to(tl.int64) * slots * (2 * UNIT)
            location_ptr = locations_ptr + b * locations_stride_b + h * locations_stride_h
            open_token = tl.load(open_rows_ptr + b).to(tl.int64) * PAGE_SIZE
            last_inner = (seq_len - 1) % PAGE_SIZE
            stop_list = tl.minimum(stop_tile, list_tiles)
            limit = tl.minimum(stop_list * TILE, blocks * BLOCK_SIZE)

            highest = tl.full((16,), float("-inf"), tl.float32)
            weight_sum = tl.zeros((16,), tl.float32)
            acc = tl.zeros((16, HEAD_DIM_PAD), tl.float32)
            # Locations are loaded two tiles ahead and resolved one tile ahead, as lists and pages are in
            # sparse_attention.
            listed = first_tile * TILE + tile_tokens
            location = _resolve(_load_locations(location_ptr, listed, limit, BLOCK_SIZE), own_map)
            location_next = _load_locations(location_ptr, listed + TILE, limit, BLOCK_SIZE)
            for tile in range(first_tile, stop_list):
                listed = tile * TILE + tile_tokens
                offset = listed % BLOCK_SIZE
                is_open = location <= _OPEN
                is_hot = location >= 0
                inner = tl.where(is_open, (_OPEN - location) * BLOCK_SIZE + offset, 0)
                valid = (listed < limit) & (inner <= last_inner)
                block = tl.where(is_open | is_hot, 0, -1 - location)
                unit = (block // BLOCKS_PER_PAGE).to(tl.int64) * num_kv_heads + h
                unit = unit * BLOCKS_PER_PAGE + block % BLOCKS_PER_PAGE
                in_slots = own_hot + tl.where(is_hot, location, 0).to(tl.int64) * (2 * UNIT)
                in_open = ((open_token + inner) * num_kv_heads + h) * HEAD_DIM
                if FLOAT8:
                    at_k = in_slots + offset * HEAD_DIM
                else:
                    at_k = tl.where(is_hot, in_slots, host_ptr + unit * (2 * UNIT)) + offset * HEAD_DIM
                at_v = tl.where(is_open, open_v_ptr + in_open, at_k + UNIT)
                at_k = tl.where(is_open, open_k_ptr + in_open, at_k)
                kv_mask = valid[:, None] & in_head[None, :]
                if FLOAT8:
                    # Most tiles have no such block: their loads are masked.
                    is_direct = valid & (location < 0) & (location > _OPEN)
                    direct_mask = is_direct[:, None] & in_head[None, :]
                    kv_mask = kv_mask & (is_direct == 0)[:, None]
                    packed = host_ptr + unit * (2 * BLOCK_SIZE * (HEAD_DIM + 1))
                    codes = (packed + offset * HEAD_DIM)[:, None] + channels[None, :]
                    scales = packed + 2 * UNIT + offset
                    k_codes = tl.load(codes, mask=direct_mask, other=0)
                    v_codes = tl.load(codes + UNIT, mask=direct_mask, other=0)
                    k_scale = tl.load(scales, mask=is_direct, other=1).to(tl.int32)[:, None]
                    v_scale = tl.load(scales + BLOCK_SIZE, mask=is_direct, other=1).to(tl.int32)[:, None]
                k = tl.load(at_k[:, None] + channels[None, :], mask=kv_mask, other=0.0)
                v = tl.load(at_v[:, None] + channels[None, :], mask=kv_mask, other=0.0)
                if FLOAT8:
                    k = tl.where(direct_mask, float8.decode(k_codes, k_scale).to(k.dtype), k)
                    v = tl.where(direct_mask, float8.decode(v_codes, v_scale).to(v.dtype), v)
                location = _resolve(location_next, own_map)
                location_next = _load_locations(location_ptr, listed + 2 * TILE, limit, BLOCK_SIZE)

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
                        page_table_ptr + b * page_table_stride,
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
    _slot_attention_kernel[(workspace.num_programs,)](
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
