"""Sizes to compile kernels at, and the arguments of operations at these sizes; what tensors hold does not matter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import sparse_kernels as sk
import torch

SINK_TOKENS, WINDOW_TOKENS, MIN_CONTEXT, CELL = 64, 1024, 2048, 64


@dataclass(frozen=True)
class Sizes:
    """A model's layer and a batch, and tensors of these sizes. By default Llama 3.1 8B, a batch of two."""

    batch: int = 2
    kv_heads: int = 8
    group_size: int = 4
    head_dim: int = 128
    page_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    table_pages: int = 16
    pool_pages: int = 3

    @property
    def per_page(self) -> int:
        return self.page_size // self.block_size

    @property
    def capacity(self) -> int:
        return self.table_pages * self.per_page

    @property
    def cells(self) -> int:
        return max(1, self.page_size // CELL)

    @property
    def plain(self) -> dict[str, int]:
        return {"page_size": self.page_size, "block_size": self.block_size}

    @property
    def mass_sizes(self) -> dict[str, Any]:
        return {"scale": self.head_dim**-0.5, **self.plain, "min_context": MIN_CONTEXT}

    @property
    def rule_sizes(self) -> dict[str, int]:
        forced = {"sink_tokens": SINK_TOKENS, "window_tokens": WINDOW_TOKENS}
        return {**self.plain, **forced, "min_context": MIN_CONTEXT}

    def queries(self) -> torch.Tensor:
        return torch.zeros(self.batch, self.kv_heads * self.group_size, self.head_dim, dtype=self.dtype)

    def pool(self) -> torch.Tensor:
        return torch.zeros(self.pool_pages * self.page_size, self.kv_heads, self.head_dim, dtype=self.dtype)

    def page_table(self) -> torch.Tensor:
        return int32(self.batch, self.table_pages)

    def seq_lens(self) -> torch.Tensor:
        return int32(self.batch)

    def masses(self) -> torch.Tensor:
        return torch.zeros(self.batch, self.kv_heads, self.group_size, self.capacity)

    def lists(self) -> torch.Tensor:
        return int32(self.batch, self.kv_heads, self.capacity)

    def counts(self) -> torch.Tensor:
        return int32(self.batch, self.kv_heads)

    def kept_mask(self) -> torch.Tensor:
        return torch.zeros(self.batch, self.kv_heads, self.capacity, dtype=torch.uint8)

    def kept_total(self) -> torch.Tensor:
        return torch.zeros(self.kv_heads, dtype=torch.int64)

    def log_sums(self) -> torch.Tensor:
        return torch.zeros(self.batch, self.kv_heads * self.group_size)

    def thumbnails(self, bits: int) -> dict[str, torch.Tensor]:
        shape = (self.pool_pages, self.kv_heads)
        return {
            "codes": torch.zeros(*shape, self.page_size, self.head_dim * bits // 8, dtype=torch.uint8),
            "low_step": torch.zeros(*shape, 2, self.head_dim, dtype=torch.bfloat16),
        }

    def means(self) -> torch.Tensor:
        return torch.zeros(self.pool_pages, self.kv_heads, self.cells, self.head_dim, dtype=self.dtype)

    def tail(self) -> sk.AttentionTail:
        return sk.AttentionTail(self.masses(), self.kept_mask(), self.means())

    def workspace(self) -> sk.AttentionWorkspace:
        return sk.AttentionWorkspace.create(3, self.group_size, self.head_dim, "cpu")

    def tap(self) -> sk.TapPoint:
        tap = sk.SelectionTap.create(
            kv_heads=self.kv_heads,
            group_size=self.group_size,
            head_dim=self.head_dim,
            capacity=self.capacity,
            dtype=self.dtype,
            device="cpu",
        )
        return sk.TapPoint(tap, 0, self.queries())

    def maps(self) -> sk.SlotMaps:
        return sk.SlotMaps.create(self.kv_heads, self.pool_pages * self.per_page, 64, "cpu")

    def fetch(self) -> sk.FetchList:
        return sk.FetchList.create(self.kv_heads, 32, "cpu")

    def host(self, float8: bool) -> torch.Tensor:
        shape = (self.pool_pages, self.kv_heads, self.per_page)
        if float8:
            return torch.zeros(*shape, 2 * self.block_size * (self.head_dim + 1), dtype=torch.uint8)
        return torch.zeros(*shape, 2, self.block_size, self.head_dim, dtype=self.dtype)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


LLAMA = Sizes()
# Seven query heads, padded to eight, as in Qwen2.5 7B; of arguments that are 1 Triton makes constants.
QWEN = Sizes(kv_heads=1, group_size=7)
SMALL = Sizes(batch=1, group_size=1, head_dim=64, page_size=16, block_size=8, dtype=torch.float16)
PHI = Sizes(head_dim=96, group_size=1)
GEMMA = Sizes(head_dim=256, group_size=2)
LONG = replace(SMALL, table_pages=16384)
# The longest rows that are split over clusters of 16 thread blocks.
HALF = replace(SMALL, table_pages=8192)
# One request of 130,000 tokens: as few rows as are split over clusters of thread blocks.
FEW = Sizes(batch=1, table_pages=2032)
# One of 131,072 tokens in a server, whose rows have room for a page more.
SERVED = Sizes(batch=1, table_pages=2049)
