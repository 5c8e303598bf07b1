"""The kernel of `split_attention`."""

import triton
import triton.language as tl

from . import _attention_plan as plan
from . import _split_tile as split_tile
from . import attention_tail
from .combine import LN_2
from .split_keys import UNITS

_UNIT: tl.constexpr = tl.constexpr(1 / UNITS)


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def split_attention_kernel(
    q_ptr,
    codes_ptr,
    bounds_ptr,
    residual_ptr,
    open_ptr,
    open_rows_ptr,
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
    G: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    SUB: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    OPEN_TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    CELLS_PER_PAGE: tl.constexpr,
    TILE_CELLS: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
):
    BLOCKS_PER_PAGE: tl.constexpr = PAGE_SIZE // BLOCK_SIZE
    TILE_BLOCKS: tl.constexpr = TILE // BLOCK_SIZE
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
    tile_blocks = tl.arange(0, TILE_BLOCKS)
    block_tokens = tl.arange(0, BLOCK_SIZE)
    sub_columns = tl.arange(0, SUB)
    in_head = channels < HEAD_DIM
    q_mask = (queries < G)[:, None] & in_head[None, :]

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
            closed_blocks = seq_len // PAGE_SIZE * BLOCKS_PER_PAGE
            heads = h * G + queries
            query_ptr = q_ptr + b * q_stride_b + h * G * q_stride_h
            query0 = split_tile.load_query(query_ptr, 0, q_stride_h, scale_log2, HEAD_DIM, SUB, G, GROUP)
            query1 = split_tile.load_query(query_ptr, 1, q_stride_h, scale_log2, HEAD_DIM, SUB, G, GROUP)
            query2 = split_tile.load_query(query_ptr, 2, q_stride_h, scale_log2, HEAD_DIM, SUB, G, GROUP)
            query3 = split_tile.load_query(query_ptr, 3, q_stride_h, scale_log2, HEAD_DIM, SUB, G, GROUP)
            page_row_ptr = page_table_ptr + b * page_table_stride
            list_ptr = lists_ptr
            if HAS_LISTS:
                list_ptr = lists_ptr + b * lists_stride_b + h * lists_stride_h
            v_head_ptr = v_ptr + h * v_stride_h
            stop_list = tl.minimum(stop_tile, list_tiles)
            stop = tl.minimum(stop_list * TILE_BLOCKS, blocks)

            highest = tl.full((16,), float("-inf"), tl.float32)
            weight_sum = tl.zeros((16,), tl.float32)
            acc = tl.zeros((16, HEAD_DIM_PAD), tl.float32)
            # List entries are loaded two tiles ahead and pages one tile ahead, as in sparse_attention; for values by
            # token, for keys by block.
            place = (first_tile * TILE + tile_tokens) // BLOCK_SIZE
            entry = split_tile.load_entries(list_ptr, place, stop, HAS_LISTS)
            entry_next = split_tile.load_entries(list_ptr, place + TILE_BLOCKS, stop, HAS_LISTS)
            page = split_tile.load_pages(page_row_ptr, entry, place, stop, closed_blocks, BLOCKS_PER_PAGE)
            inner = entry % BLOCKS_PER_PAGE * BLOCK_SIZE + tile_tokens % BLOCK_SIZE
            k_place = first_tile * TILE_BLOCKS + tile_blocks
            k_entry = split_tile.load_entries(list_ptr, k_place, stop, HAS_LISTS)
            k_entry_next = split_tile.load_entries(list_ptr, k_place + TILE_BLOCKS, stop, HAS_LISTS)
            k_page = split_tile.load_pages(page_row_ptr, k_entry, k_place, stop, closed_blocks, BLOCKS_PER_PAGE)
            k_inner = k_entry % BLOCKS_PER_PAGE * BLOCK_SIZE
            for tile in range(first_tile, stop_list):
                present = k_page >= 0
                summary = tl.maximum(k_page, 0).to(tl.int64) * num_kv_heads + h
                first = summary * PAGE_SIZE + k_inner
                rests = residual_ptr + first * HEAD_DIM
                bounds = bounds_ptr + summary * (2 * HEAD_DIM)
                at = block_tokens[None, :, None] * (HEAD_DIM // 4) + sub_columns[None, None, :]
                packed = tl.load(
                    (codes_ptr + first * (HEAD_DIM // 4))[:, None, None] + at,
                    mask=present[:, None, None] & (sub_columns < HEAD_DIM // 4)[None, None, :],
                    other=0,
                )
                valid = page >= 0
                slots = tl.maximum(page, 0).to(tl.int64) * PAGE_SIZE + inner
                v = tl.load(
                    v_head_ptr + slots[:, None] * v_stride_t + channels[None, :],
                    mask=valid[:, None] & in_head[None, :],
                    other=0.0,
                )
                scores = tl.zeros((TILE_BLOCKS, BLOCK_SIZE, GROUP), tl.float32)
                bias = tl.zeros((TILE_BLOCKS, SUB, GROUP), tl.float32)
                scores, bias = split_tile.add_products(
                    scores, bias, packed, query0, rests, bounds, present, 0, HEAD_DIM, HALF, ASM
                )
                scores, bias = split_tile.add_products(
                    scores, bias, packed, query1, rests, bounds, present, 1, HEAD_DIM, HALF, ASM
                )
                scores, bias = split_tile.add_products(
                    scores, bias, packed, query2, rests, bounds, present, 2, HEAD_DIM, HALF, ASM
                )
                scores, bias = split_tile.add_products(
                    scores, bias, packed, query3, rests, bounds, present, 3, HEAD_DIM, HALF, ASM
                )
                scores = scores * _UNIT + tl.sum(bias, 1)[:, None, :]
                scores = tl.trans(tl.reshape(scores, (TILE, GROUP)))
                # Rows beyond the group repeat it: their results are not stored.
                scores = tl.reshape(tl.broadcast_to(scores[None, :, :], (16 // GROUP, GROUP, TILE)), (16, TILE))

                ahead = (tile + 1) * TILE_BLOCKS
                place = ahead + tile_tokens // BLOCK_SIZE
                page = split_tile.load_pages(page_row_ptr, entry_next, place, stop, closed_blocks, BLOCKS_PER_PAGE)
                inner = entry_next % BLOCKS_PER_PAGE * BLOCK_SIZE + tile_tokens % BLOCK_SIZE
                entry_next = split_tile.load_entries(list_ptr, place + TILE_BLOCKS, stop, HAS_LISTS)
                k_place = ahead + tile_blocks
                k_page = split_tile.load_pages(
                    page_row_ptr, k_entry_next, k_place, stop, closed_blocks, BLOCKS_PER_PAGE
                )
                k_inner = k_entry_next % BLOCKS_PER_PAGE * BLOCK_SIZE
                k_entry_next = split_tile.load_entries(list_ptr, k_place + TILE_BLOCKS, stop, HAS_LISTS)
                highest, weight_sum, acc = split_tile.add_tokens(highest, weight_sum, acc, scores, valid, v)

            # The open page's blocks are the last of a list; the program that has the list's end reads them.
            if (first_tile < list_tiles) & (stop_tile >= list_tiles) & (seq_len % PAGE_SIZE != 0):
                q = tl.load(
                    q_ptr + b * q_stride_b + heads[:, None] * q_stride_h + channels[None, :], mask=q_mask, other=0.0
                )
                open_token = tl.load(open_rows_ptr + b).to(tl.int64) * PAGE_SIZE
                open_page = tl.load(page_row_ptr + seq_len // PAGE_SIZE).to(tl.int64) * PAGE_SIZE
                highest, weight_sum, acc = split_tile.add_open_page(
                    highest,
                    weight_sum,
                    acc,
                    q,
                    open_ptr + (open_token * num_kv_heads + h) * HEAD_DIM,
                    num_kv_heads * HEAD_DIM,
                    v_head_ptr + open_page * v_stride_t,
                    v_stride_t,
                    list_ptr,
                    blocks,
                    closed_blocks,
                    seq_len % PAGE_SIZE,
                    scale_log2,
                    HEAD_DIM,
                    PAGE_SIZE,
                    BLOCK_SIZE,
                    OPEN_TILE,
                    HAS_LISTS,
                )

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
                        G,
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
                    tl.store(lse_ptr + b * num_kv_heads * G + heads, row_lse, mask=queries < G)
            else:
                slot = 2 * program + (first_tile == 0).to(tl.int32)
                parts = slot * G + queries
                tl.store(partial_out_ptr + parts[:, None] * HEAD_DIM + channels[None, :], acc, mask=q_mask)
                tl.store(partial_max_ptr + parts, highest, mask=queries < G)
                tl.store(partial_sum_ptr + parts, weight_sum, mask=queries < G)
        # Past `end` if a later program goes on with this row.
        before += tiles
        cursor = before
        row += 1
