"""The tail of a sparse attention: mean values that stand for the blocks that are not read, weighted by their mass.

Part of `sparse_attention`, whose programs work on tiles of the tail as on tiles of listed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import check_choice, check_contiguous, check_dtype, check_inner_contiguous, check_rows, check_shape
from .combine import LOG2_E

TILE_CELLS = 64
"""Cells of a tile. With cells of 64 tokens a tile moves about two thirds of the bytes that 64 listed tokens do."""

_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)


@dataclass(frozen=True)
class AttentionTail:
    """What stands for the blocks `j` of closed pages that are not listed: a token of log score `log_mass[j]`.

    With the listed tokens' scores `s_t`, `out = (sum_t e**s_t v_t + sum_j e**log_mass[j] m_j) / (sum_t e**s_t + sum_j
    e**log_mass[j])`, where `m_j` is the mean value of the block's cell: a page, or an equal part of one that holds
    whole blocks. Blocks of log mass -inf add nothing. The weights of a cell are rounded to the type of the means before
    they are multiplied with them, as attention does with its own. Rows that list all their blocks have no tail: none
    of this is read for them.

    Attributes:
        log_mass: `[B, Hkv, G, N]` fp32, `G` in 1..16; last dimension contiguous. Neither NaN nor +inf in rows that
            leave blocks out, which the rules see to.
        kept_mask: `[>=B, Hkv, N]` uint8: whether a block is listed, as the rules write it; last dimension contiguous.
        value_means: `[P, Hkv, C, D]` in the pool's dtype, contiguous: mean values of the `C` cells of each closed page.
    """

    log_mass: torch.Tensor
    kept_mask: torch.Tensor
    value_means: torch.Tensor

    def check(self, out: torch.Tensor, kv_heads: int, page_size: int, block_size: int) -> None:
        """Raises ValueError unless the tensors fit an attention that writes `out [B, Hkv * G, D]`."""
        batch, heads, head_dim = out.shape
        check_shape("tail.log_mass", self.log_mass, batch, kv_heads, heads // kv_heads, None)
        check_dtype("tail.log_mass", self.log_mass, torch.float32)
        check_inner_contiguous("tail.log_mass", self.log_mass)
        check_rows("tail.kept_mask", self.kept_mask, batch, ndim=3)
        check_shape("tail.kept_mask", self.kept_mask, None, kv_heads, self.log_mass.shape[3])
        check_dtype("tail.kept_mask", self.kept_mask, torch.uint8)
        check_inner_contiguous("tail.kept_mask", self.kept_mask)
        check_shape("tail.value_means", self.value_means, None, kv_heads, None, head_dim)
        check_dtype("tail.value_means", self.value_means, out.dtype)
        check_contiguous("tail.value_means", self.value_means)
        allowed = tuple(n for n in (1, 2, 4, 8, 16) if page_size % n == 0 and page_size // n % block_size == 0)
        check_choice("cells a page in tail.value_means", self.value_means.shape[2], allowed)

    def tile_tokens(self, page_size: int) -> int:
        """Tokens that a tile stands for."""
        return TILE_CELLS * (page_size // self.value_means.shape[2])


def add_tail_reference(
    tail: AttentionTail,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_counts: torch.Tensor,
    *,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Completes `out [B, Hq, D]` and `lse [B, Hq]` of the listed tokens alone, in plain torch."""
    batch, kv_heads, group, _ = tail.log_mass.shape
    per_cell = page_size // tail.value_means.shape[2] // block_size
    for b, length in enumerate(seq_lens[:batch].tolist()):
        pages = page_table[b, : length // page_size].long()
        closed = len(pages) * (page_size // block_size)
        leaves_out = (block_counts[b] < -(-length // block_size))[:, None]
        left_out = (leaves_out & (tail.kept_mask[b, :, :closed] == 0))[:, None]
        mass = tail.log_mass[b, :, :, :closed].masked_fill(~left_out, float("-inf"))
        row_lse = lse[b].view(kv_heads, group)
        joined = torch.cat((row_lse[..., None], mass), -1)
        weights = joined.softmax(-1)
        by_cell = weights[..., 1:].unflatten(-1, (closed // per_cell, per_cell)).sum(-1)
        means = tail.value_means[pages].transpose(0, 1).flatten(1, 2).float()
        row = out[b].view(kv_heads, group, -1)
        added = weights[..., :1] * row.float() + by_cell @ means
        has_tail = leaves_out[:, None] & (mass > float("-inf")).any(-1, keepdim=True)
        row.copy_(torch.where(has_tail, added.to(out.dtype), row))
        row_lse.copy_(torch.where(has_tail[..., 0], joined.logsumexp(-1), row_lse))


@triton.jit
def add_tiles(
    highest,
    weight_sum,
    acc,
    first_tile,
    stop_tile,
    closed_pages,
    h,
    num_kv_heads,
    mass_row_ptr,
    mass_stride_g,
    kept_row_ptr,
    means_ptr,
    page_row_ptr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CELLS_PER_PAGE: tl.constexpr,
    TILE_CELLS: tl.constexpr,
):
    """A running softmax (`highest [16]`, `weight_sum [16]`, `acc [16, D]`) with tiles `[first_tile, stop_tile)` of a
    row's tail; pointers are the row's."""
    BLOCKS_PER_CELL: tl.constexpr = PAGE_SIZE // CELLS_PER_PAGE // BLOCK_SIZE
    TILE_BLOCKS: tl.constexpr = TILE_CELLS * BLOCKS_PER_CELL
    queries = tl.arange(0, 16)
    channels = tl.arange(0, acc.shape[1])
    tile_cells = tl.arange(0, TILE_CELLS)
    tile_blocks = tl.arange(0, TILE_BLOCKS)
    num_cells = closed_pages * CELLS_PER_PAGE
    num_blocks = num_cells * BLOCKS_PER_CELL
    cells = first_tile * TILE_CELLS + tile_cells
    # Pages are loaded a tile ahead, so that the chain page -> mean costs one tile's time only at the start.
    pages = tl.load(page_row_ptr + cells // CELLS_PER_PAGE, mask=cells < num_cells, other=0)
    for tile in range(first_tile, stop_tile):
        cells = tile * TILE_CELLS + tile_cells
        places = (pages.to(tl.int64) * num_kv_heads + h) * CELLS_PER_PAGE + cells % CELLS_PER_PAGE
        means = tl.load(
            means_ptr + places[:, None] * HEAD_DIM + channels[None, :],
            mask=(cells < num_cells)[:, None] & (channels < HEAD_DIM)[None, :],
            other=0.0,
        )
        ahead = cells + TILE_CELLS
        pages = tl.load(page_row_ptr + ahead // CELLS_PER_PAGE, mask=ahead < num_cells, other=0)
        blocks = tile * TILE_BLOCKS + tile_blocks
        kept = tl.load(kept_row_ptr + blocks, mask=blocks < num_blocks, other=1)
        mass = tl.load(
            mass_row_ptr + queries[:, None] * mass_stride_g + blocks[None, :],
            mask=(queries < GROUP)[:, None] & (blocks < num_blocks)[None, :],
            other=float("-inf"),
        )
        mass = tl.where((kept == 0)[None, :], mass * _LOG2_E, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(mass, 1))
        # While nothing had any weight the maximum is -inf: shift by 0 so that no -inf - -inf arises.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        decay = tl.exp2(highest - shift)
        weights = tl.exp2(mass - shift[:, None])
        weight_sum = weight_sum * decay + tl.sum(weights, 1)
        by_cell = tl.sum(tl.reshape(weights, (16, TILE_CELLS, BLOCKS_PER_CELL)), 2)
        acc = acc * decay[:, None]
        acc = tl.dot(by_cell.to(means.dtype), means, acc, input_precision="ieee")
        highest = new_highest
    return highest, weight_sum, acc
