"""How sparse attention shares its work, and the buffers in which programs leave the parts of shared rows.

The work is a sequence of tiles: row after row ((request, KV head) pairs in row-major order), each row cut into tiles of
`tile` listed tokens, the last tile of a row possibly short. With `T` tiles and `n = min(num_programs, T)`, program
`i < n` takes tiles `[i * T // n, (i + 1) * T // n)`: equal shares up to one tile, none empty. Tile `t` therefore
belongs to program `((t + 1) * n - 1) // T`. All kernels recompute this from the counts on the device, so no host
plan exists that could go stale in a CUDA graph.

A row that leaves blocks out and has a tail has tiles of its tail behind those of its listed tokens: one for each
`TAIL_TILE` tokens of its closed pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import (
    MAX_GROUP_SIZE,
    check_contiguous,
    check_dtype,
    check_inner_contiguous,
    check_pool,
    check_rows,
    check_shape,
    check_sizes,
)

PLAN_ROWS = 512
"""Rows whose counts a program loads at once while it looks for its share."""

PROGRAMS_PER_SM = 2
"""Default grid: two programs a multiprocessor, so that one loads while the other waits at a row border."""


@dataclass(frozen=True)
class AttentionWorkspace:
    """Caller-owned buffers for rows that several programs share; one workspace serves any batch and any layer in turn.

    Program `i` writes entry `2 * i + 1` for a row that starts in it and ends in a later program, and entry `2 * i` for
    a row that started in an earlier one. Maximum and sum are apart because their log-sum-exp would lose the sum to
    rounding when scores are in the thousands.

    Attributes:
        partial_out: `[2 * num_programs, G, D]` fp32; sum over the part's tokens of `2**(s - max) * v`, where
            `s = q . k * scale * log2(e)`.
        partial_max: `[2 * num_programs, G]` fp32; largest `s` of the part.
        partial_sum: `[2 * num_programs, G]` fp32; sum of `2**(s - max)`.
        num_programs: size of the attention grid.
    """

    partial_out: torch.Tensor
    partial_max: torch.Tensor
    partial_sum: torch.Tensor
    num_programs: int

    @classmethod
    def create(
        cls, num_programs: int | None, group_size: int, head_dim: int, device: torch.device | str
    ) -> AttentionWorkspace:
        """Allocates a workspace.

        Args:
            num_programs: size of the attention grid; None takes `PROGRAMS_PER_SM` for each multiprocessor of a GPU,
                and one on other devices.
            group_size: `G`, query heads of a KV head, 1 to 16.
            head_dim: `D`.
            device: where the kernels run.

        Raises:
            ValueError: `num_programs` or `group_size` is out of range.
        """
        device = torch.device(device)
        if num_programs is None:
            is_gpu = device.type == "cuda"
            num_programs = (
                PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
            )
        if num_programs < 1:
            raise ValueError(f"num_programs is {num_programs}; needed: at least 1")
        if not 1 <= group_size <= MAX_GROUP_SIZE:
            raise ValueError(f"group_size is {group_size}; needed: 1 to {MAX_GROUP_SIZE}")
        return cls(
            partial_out=torch.empty(2 * num_programs, group_size, head_dim, dtype=torch.float32, device=device),
            partial_max=torch.empty(2 * num_programs, group_size, dtype=torch.float32, device=device),
            partial_sum=torch.empty(2 * num_programs, group_size, dtype=torch.float32, device=device),
            num_programs=num_programs,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.partial_out.nbytes + self.partial_max.nbytes + self.partial_sum.nbytes


@dataclass(frozen=True)
class TileConfig:
    """Tile size in listed tokens, and the launch options of the attention kernel."""

    tile: int
    num_warps: int
    num_stages: int


def tile_config(head_dim: int, dtype: torch.dtype) -> TileConfig:
    """The tile for a head dimension and KV dtype.

    Two programs of 16-bit KV fit a multiprocessor's shared memory, with at least 64 KiB of KV in flight in each
    multiprocessor. A tile is never smaller than the largest block, so that every tile of a row holds a readable token.
    """
    if dtype.itemsize == 4:
        return TileConfig(tile=64, num_warps=8, num_stages=2 if head_dim <= 128 else 1)
    if head_dim <= 64:
        return TileConfig(tile=128, num_warps=4, num_stages=4)
    if head_dim <= 128:
        return TileConfig(tile=128, num_warps=4, num_stages=2)
    return TileConfig(tile=64, num_warps=8, num_stages=2)


def tiles_per_row(
    seq_lens: torch.Tensor,
    block_counts: torch.Tensor | None,
    num_kv_heads: int,
    *,
    block_size: int,
    tile: int,
    page_size: int = 1,
    tail_tile: int = 0,
) -> list[int]:
    """The plan's rows as the kernels see them, computed on the host: for references, tests and benchmarks."""
    lengths = seq_lens.clamp(min=0)[:, None]
    blocks = (-(-lengths // block_size)).expand(-1, num_kv_heads)
    tail = torch.zeros_like(blocks)
    if block_counts is not None:
        kept = torch.minimum(blocks, block_counts.clamp(min=0))
        if tail_tile:
            closed = lengths // page_size * page_size
            tail = torch.where(kept < blocks, -(-closed // tail_tile), 0)
        blocks = kept
    return (-(-blocks * block_size // tile) + tail).flatten().tolist()


def check_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_lists: torch.Tensor | None,
    block_counts: torch.Tensor | None,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
    workspace: AttentionWorkspace | None,
    lse: torch.Tensor | None,
) -> None:
    """Raises ValueError unless the arguments of `sparse_attention` fit together; reads no value on the device."""
    check_sizes(page_size, block_size)
    check_pool("k_pool", k_pool, page_size)
    check_pool("v_pool", v_pool, page_size)
    check_shape("v_pool", v_pool, None, *k_pool.shape[1:])
    check_dtype("v_pool", v_pool, k_pool.dtype)
    num_kv_heads, head_dim = k_pool.shape[1:]
    check_shape("q", q, None, None, head_dim)
    check_dtype("q", q, k_pool.dtype)
    check_inner_contiguous("q", q)
    batch, num_q_heads, _ = q.shape
    group, rest = divmod(num_q_heads, num_kv_heads)
    if rest or not 1 <= group <= MAX_GROUP_SIZE:
        raise ValueError(
            f"q has {num_q_heads} heads for {num_kv_heads} KV heads; needed: 1 to {MAX_GROUP_SIZE} for each KV head"
        )
    check_rows("page_table", page_table, batch, ndim=2)
    check_dtype("page_table", page_table, torch.int32)
    check_inner_contiguous("page_table", page_table)
    check_rows("seq_lens", seq_lens, batch)
    check_dtype("seq_lens", seq_lens, torch.int32)
    if (block_lists is None) != (block_counts is None):
        raise ValueError("block_lists and block_counts must be given together, or both be None")
    if block_lists is not None and block_counts is not None:
        check_rows("block_lists", block_lists, batch, ndim=3)
        check_shape("block_lists", block_lists, None, num_kv_heads, None)
        check_dtype("block_lists", block_lists, torch.int32)
        check_inner_contiguous("block_lists", block_lists)
        check_rows("block_counts", block_counts, batch, ndim=2)
        check_shape("block_counts", block_counts, None, num_kv_heads)
        check_dtype("block_counts", block_counts, torch.int32)
        check_contiguous("block_counts", block_counts)
    check_shape("out", out, *q.shape)
    check_dtype("out", out, q.dtype)
    check_inner_contiguous("out", out)
    if lse is not None:
        check_shape("lse", lse, batch, num_q_heads)
        check_dtype("lse", lse, torch.float32)
        check_contiguous("lse", lse)
    if workspace is not None:
        check_shape("workspace.partial_out", workspace.partial_out, 2 * workspace.num_programs, group, head_dim)


@triton.jit
def row_tiles(
    rows,
    num_rows,
    num_kv_heads,
    seq_lens_ptr,
    counts_ptr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    HAS_LISTS: tl.constexpr,
):
    """Listed blocks of each row, tiles of them, and tiles of the row's tail; all 0 beyond `num_rows`.

    A count never exceeds the request's blocks, so that a count left over from an earlier request of a now empty row is
    harmless.
    """
    inside = rows < num_rows
    seq_lens = tl.maximum(tl.load(seq_lens_ptr + rows // num_kv_heads, mask=inside, other=0), 0)
    blocks = (seq_lens + BLOCK_SIZE - 1) // BLOCK_SIZE
    tail_tiles = tl.zeros_like(blocks)
    if HAS_LISTS:
        kept = tl.minimum(blocks, tl.maximum(tl.load(counts_ptr + rows, mask=inside, other=0), 0))
        if TAIL_TILE:
            closed = seq_lens // PAGE_SIZE * PAGE_SIZE
            tail_tiles = tl.where(kept < blocks, (closed + TAIL_TILE - 1) // TAIL_TILE, 0)
        blocks = kept
    return blocks, (blocks * BLOCK_SIZE + TILE - 1) // TILE, tail_tiles


@triton.jit
def program_share(
    program,
    num_programs,
    num_rows,
    num_kv_heads,
    seq_lens_ptr,
    counts_ptr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """First and end tile of a program's share, the row that holds the first, and the tiles before that row."""
    total = tl.zeros((), tl.int32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        _, tiles, tail_tiles = row_tiles(
            rows, num_rows, num_kv_heads, seq_lens_ptr, counts_ptr, BLOCK_SIZE, PAGE_SIZE, TILE, TAIL_TILE, HAS_LISTS
        )
        total += tl.sum(tiles + tail_tiles)
    working = tl.minimum(num_programs, total)
    begin = tl.zeros((), tl.int32)
    end = tl.zeros((), tl.int32)
    if program < working:
        begin = (program.to(tl.int64) * total // working).to(tl.int32)
        end = ((program.to(tl.int64) + 1) * total // working).to(tl.int32)

    row = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    seen = tl.zeros((), tl.int32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        _, tiles, tail_tiles = row_tiles(
            rows, num_rows, num_kv_heads, seq_lens_ptr, counts_ptr, BLOCK_SIZE, PAGE_SIZE, TILE, TAIL_TILE, HAS_LISTS
        )
        tiles += tail_tiles
        ends = seen + tl.cumsum(tiles, 0)
        # Tiles do not decrease, so the rows that end at or before `begin` are the first ones.
        passed = (ends <= begin) & (rows < num_rows)
        row += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0)))
        seen += tl.sum(tiles)
    return begin, end, row, before


@triton.jit
def row_parts(
    row,
    num_rows,
    num_programs,
    num_kv_heads,
    seq_lens_ptr,
    counts_ptr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Tiles of a row, and the first and last program that work on it; meaningless programs if it has no tiles."""
    before = tl.zeros((), tl.int32)
    own = tl.zeros((), tl.int32)
    total = tl.zeros((), tl.int32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        _, tiles, tail_tiles = row_tiles(
            rows, num_rows, num_kv_heads, seq_lens_ptr, counts_ptr, BLOCK_SIZE, PAGE_SIZE, TILE, TAIL_TILE, HAS_LISTS
        )
        tiles += tail_tiles
        total += tl.sum(tiles)
        before += tl.sum(tl.where(rows < row, tiles, 0))
        own += tl.sum(tl.where(rows == row, tiles, 0))
    # The owner of tile t is ((t + 1) * working - 1) // total; an empty batch has total 0.
    working = tl.minimum(num_programs, total).to(tl.int64)
    divisor = tl.maximum(total, 1)
    first_owner = (((before + 1) * working - 1) // divisor).to(tl.int32)
    last_owner = (((before + own) * working - 1) // divisor).to(tl.int32)
    return own, first_owner, last_owner
