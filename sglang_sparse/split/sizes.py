"""What a split key cache takes: per token, for open pages, and for the keys that prefill puts together again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_sparse import memory
from sglang_sparse.geometry import Geometry
from sglang_sparse.open_pages import EXTRA_ROWS
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.selection import make_estimator
from sglang_sparse.tail import make_tail


def read_bytes(geometry: Geometry) -> float:
    """Bytes of key and value that attention reads of a token of a block, its share of the page's bounds included."""
    g = geometry
    key = g.head_dim * (1 + 2 / 8 + 4 / g.block_size)
    return key + g.head_dim * g.dtype.itemsize


@dataclass(frozen=True)
class SplitShape:
    """What sizes depend on; bytes are those of all layers and KV heads."""

    geometry: Geometry
    layers: int
    key_bytes: float
    """Of a token, as it is kept: codes, residual and its share of the page's bounds, in one layer and KV head."""
    tail_bytes: float
    """Of a token's share of the mean values, in one layer and KV head."""

    @classmethod
    def of(cls, options: SparseDecodeOptions, geometry: Geometry, layers: int) -> SplitShape:
        """The sizes of a model's cache."""
        tail = make_tail(options, geometry)
        key_bytes = make_estimator(options, geometry).summary_bytes()
        return cls(geometry, layers, key_bytes, tail.summary_bytes() if tail else 0.0)

    @property
    def heads(self) -> int:
        return self.layers * self.geometry.kv_heads

    @property
    def value_bytes(self) -> float:
        """Of a token in one layer and KV head."""
        return self.geometry.kv_bytes / 2

    @property
    def saving(self) -> float:
        """Share of the KV bytes of a token that splitting its key saves; codes count as part of the key."""
        return (self.value_bytes - self.key_bytes) / self.geometry.kv_bytes

    @property
    def token_share(self) -> float:
        """Bytes of a token, mean values included, ÷ those of its key and value as they are."""
        return (self.value_bytes + self.key_bytes + self.tail_bytes) / self.geometry.kv_bytes

    def open_bytes(self, rows: int) -> int:
        """Of the keys of open pages."""
        g = self.geometry
        return rows * self.layers * g.page_size * g.kv_heads * g.kv_bytes // 2

    def staging_bytes(self, tokens: int) -> int:
        """Of one layer's keys and values of a request of `tokens` tokens, as prefill reads them."""
        return tokens * self.geometry.kv_heads * self.geometry.kv_bytes


def reserved_bytes(
    shape: SplitShape,
    options: SparseDecodeOptions,
    *,
    context: int,
    max_pages: int,
    max_requests: int,
    device: torch.device | str = "cpu",
) -> int:
    """Memory that does not grow with the pool.

    Args:
        context: tokens of the longest request.
        max_pages: pages that tables have room for.
        max_requests: requests that may run at once.
        device: where the steps run.
    """
    step = memory.step_buffer_bytes(
        options, shape.geometry, layers=shape.layers, max_pages=max_pages, max_requests=max_requests, device=device
    )
    # The table in which estimators find open pages.
    tables = max_requests * max_pages * 4
    return step + tables + shape.open_bytes(max_requests + EXTRA_ROWS) + shape.staging_bytes(context)
