"""The attention backend of a server with split keys."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_sparse import sglang_compat, support
from sglang_sparse.backend import checked_geometry
from sglang_sparse.dense_attention import choose_dense
from sglang_sparse.geometry import table_pages
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.own_pool_backend import OwnPoolDecodeBackend, OwnPoolPrefillBackend
from sglang_sparse.self_check import SELF_CHECK_VARIABLE
from sglang_sparse.split.decode import SplitDecode
from sglang_sparse.split.kv_pool import SplitKVPool
from sglang_sparse.split.prefill import SplitPrefill

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class SplitDecodeBackend(OwnPoolDecodeBackend):
    """Serves decode batches from split keys, open pages and the pool's values."""

    def __init__(self, model_runner: ModelRunner, options: SparseDecodeOptions) -> None:
        AttentionBackend.__init__(self)
        layers = support.attention_layers(model_runner.model)
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, SplitKVPool):
            raise RuntimeError(f"the KV pool is {type(pool).__name__}: another plugin replaces that of split keys")
        geometry = checked_geometry(model_runner, options, layers)
        self.kv_pool = pool
        self.layers = self._layers = len(layers)
        self.req_to_token = self._req_to_token = model_runner.req_to_token_pool.req_to_token
        rows, width = self.req_to_token.shape
        self.step = self.own = self.split = SplitDecode(
            options,
            geometry,
            values=pool.values,
            rows=rows,
            max_requests=rows,
            max_pages=table_pages(width, pool.page_size),
            device=pool.device,
            keeps_copies=os.environ.get(SELF_CHECK_VARIABLE) == "1",
            timed=sglang_compat.exports_metrics(model_runner),
        )
        self.prefill = self._split_prefill = SplitPrefill(self.split, staging_tokens=width)
        self.audit = None
        self._prefill_backend: Any = None
        shape = pool.shape
        logger.info(
            "Sparse decode with split keys: %d tokens of %.0f instead of %.0f bytes in each layer and KV head (%.1f%% "
            "less), estimator thumbnail with %d bits, rule %s, path %s, tail %s; open pages of %d requests %.2f GB, "
            "step buffers %.2f GB, prefill %.2f GB.",
            pool.size,
            shape.value_bytes + shape.key_bytes,
            geometry.kv_bytes,
            100 * shape.saving,
            options.thumbnail_bits,
            self.step.rule.name,
            self.step.paths,
            options.resolved_tail,
            rows,
            self.split.open_keys.nbytes / 1e9,
            self.step.buffers.bytes / 1e9,
            shape.staging_bytes(width) / 1e9,
        )

    def make_prefill(self, name: str) -> OwnPoolPrefillBackend:
        """As `OwnPoolDecodeBackend.make_prefill`; chooses what attends."""
        self._split_prefill.attention = choose_dense(self.step.geometry, self.kv_pool.device, name)
        return super().make_prefill(name)

    def pool_copies(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, `[slots, Hkv, D]`: for checks, which need the copies of keys."""
        if self.split.copies is None:
            raise RuntimeError(f"split keys can be checked only if {SELF_CHECK_VARIABLE} was 1 at start")
        return self.split.copies[layer], self.split.values[layer]
