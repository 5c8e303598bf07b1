"""Rule `top-delta` with thumbnails in one pass: what a decode step needs of `fused_top_delta`."""

from __future__ import annotations

from typing import Any

import torch
from sparse_kernels import FusedWorkspace, TapPoint, fused_top_delta

from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.selection.estimators import Summary
from sglang_sparse.tail import make_tail


class FusedPass:
    """Selects and attends in one launch and a combine; holds the buffers for it, for batches up to `max_requests`."""

    def __init__(
        self, options: SparseDecodeOptions, geometry: Geometry, max_requests: int, device: torch.device | str
    ) -> None:
        tail = make_tail(options, geometry)
        self.workspace = FusedWorkspace.create(
            geometry.kv_heads,
            geometry.group_size,
            geometry.head_dim,
            geometry.dtype,
            page_size=geometry.page_size,
            block_size=geometry.block_size,
            device=device,
            cells=geometry.page_size // tail.cell if tail else 1,
            rows=max_requests * geometry.kv_heads,
        )
        self._arguments: dict[str, Any] = {
            "bits": options.thumbnail_bits,
            "page_size": geometry.page_size,
            "block_size": geometry.block_size,
            "sink_tokens": options.sink_tokens,
            "window_tokens": options.window_tokens,
            "min_context": options.min_context,
        }

    def attend(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        summary: Summary,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        thresholds: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        block_counts: torch.Tensor,
        kept_total: torch.Tensor,
        last_kept: torch.Tensor | None,
        value_means: torch.Tensor | None,
        tap: TapPoint | None,
    ) -> None:
        """Attention of one layer; `thresholds` is delta, `summary` that of the thumbnail estimator. `last_kept` is what
        the layer's rows kept in the step before, by which the work is shared out; None for equal shares."""
        codes, low_step = summary
        fused_top_delta(
            q,
            k_pool,
            v_pool,
            codes,
            low_step,
            page_table,
            seq_lens,
            delta=thresholds,
            scale=scale,
            out=out,
            block_counts=block_counts,
            workspace=self.workspace,
            value_means=value_means,
            kept_total=kept_total,
            last_kept=last_kept,
            tap=tap,
            **self._arguments,
        )
