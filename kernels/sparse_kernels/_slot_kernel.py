"""The kernel of `slot_attention`."""

import triton
import triton.language as tl

from . import _attention_plan as plan
from . import _float8_bits as float8
from . import attention_tail
from .combine import LN_2
from .slot_maps import OPEN

_OPEN: tl.constexpr = tl.constexpr(OPEN)


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


@triton.jit
def _decode_rows(tile, codes, scales, offset, rows, in_head, HEAD_DIM: tl.constexpr):
    """`tile` `[TILE, D]` with those of `rows` replaced by what float8 blocks hold at `codes` and `scales` `[TILE]`."""
    channels = tl.arange(0, tile.shape[1])
    mask = rows[:, None] & in_head[None, :]
    code = tl.load((codes + offset * HEAD_DIM)[:, None] + channels[None, :], mask=mask, other=0)
    scale = tl.load(scales + offset, mask=rows, other=1).to(tl.int32)
    return tl.where(mask, float8.decode(code, scale[:, None]).to(tile.dtype), tile)


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def slot_attention_kernel(
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
                    is_direct = valid & (location < 0) & (location > _OPEN)
                    kv_mask = kv_mask & (is_direct == 0)[:, None]
                k = tl.load(at_k[:, None] + channels[None, :], mask=kv_mask, other=0.0)
                v = tl.load(at_v[:, None] + channels[None, :], mask=kv_mask, other=0.0)
                if FLOAT8:  # noqa: SIM102 - a condition of the compiler's
                    # Few tiles have such blocks; in a branch their loads take no shared memory from the others.
                    if tl.max(is_direct.to(tl.int32), 0) > 0:
                        packed = host_ptr + unit * (2 * BLOCK_SIZE * (HEAD_DIM + 1))
                        k = _decode_rows(k, packed, packed + 2 * UNIT, offset, is_direct, in_head, HEAD_DIM)
                        v = _decode_rows(
                            v, packed + UNIT, packed + 2 * UNIT + BLOCK_SIZE, offset, is_direct, in_head, HEAD_DIM
                        )
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
