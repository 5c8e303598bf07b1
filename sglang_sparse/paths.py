"""Which way rule `top-delta` takes through a layer: block lists, or the fused pass.

By way of lists a layer estimates, lists and attends in turn; the fused pass does all three in one launch and a combine
(`fused_top_delta`). Other rules have block lists only. A CUDA graph is captured for each batch size, so that the choice
by batch size costs nothing at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sparse_kernels import fused_rows_are_aligned

from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.selection_options import THUMBNAILS

FUSED_BATCHES: dict[tuple[int, bool], tuple[int, ...]] = {
    (2, False): (1, 2, 4),
    (2, True): (1, 2, 4),
    (4, False): (1,),
    (4, True): (1,),
}
"""By bits of the thumbnails and whether there is a tail, the batches for which `auto` takes the fused pass if its rows
are aligned: those for which it was nowhere more than 1.5% slower than lists by `python -m benchmarks kernel
fused_top_delta`, with 8 KV heads of 4 query heads on an H200, at 8,192 to 262,144 tokens and 5 to 100% kept, a real
model's heads among them. With 4 bits it is faster for batches 2 and 4 too, up to 130,000 and 32,768 tokens
(docs/performance.md). Measured were batches 1, 2 and 4, and 2 and 4 bits."""


@dataclass(frozen=True)
class Paths:
    """The way that each batch size takes."""

    always_fused: bool
    fused_batches: tuple[int, ...]
    """Batches for which `auto`, if it is what chooses, takes the fused pass; ascending."""
    chosen_by_auto: bool
    """Whether there was a choice, and nobody made it."""

    @classmethod
    def of(cls, options: SparseDecodeOptions, geometry: Geometry, device: torch.device | str) -> Paths:
        """The paths for a layer's shape on a device."""
        # The fused pass reads keys as they are.
        can_fuse = options.rule == "top-delta" and options.estimator in THUMBNAILS and options.kv_format == "model"
        by_auto = can_fuse and options.path == "auto"
        batches = FUSED_BATCHES.get((options.thumbnail_bits, options.resolved_tail != "drop"), ()) if by_auto else ()
        return cls(
            always_fused=can_fuse and options.path == "fused",
            # Unaligned rows took up to a quarter longer than lists.
            fused_batches=tuple(
                batch
                for batch in batches
                if fused_rows_are_aligned(
                    batch,
                    geometry.kv_heads,
                    geometry.group_size,
                    geometry.head_dim,
                    geometry.dtype,
                    page_size=geometry.page_size,
                    block_size=geometry.block_size,
                    device=device,
                )
            ),
            chosen_by_auto=by_auto,
        )

    def takes_fused(self, batch: int) -> bool:
        """Whether a batch of `batch` requests takes the fused pass."""
        return self.always_fused or batch in self.fused_batches

    def most_fused(self, max_requests: int) -> int:
        """The largest batch that takes the fused pass, of batches up to `max_requests`; 0 if none does."""
        if self.always_fused:
            return max_requests
        return max((batch for batch in self.fused_batches if batch <= max_requests), default=0)

    @property
    def ever_lists(self) -> bool:
        """Whether some batch takes block lists."""
        return not self.always_fused

    def __str__(self) -> str:
        """For the log."""
        if self.always_fused:
            return "fused"
        if self.fused_batches:
            return f"fused at batch {', '.join(map(str, self.fused_batches))}, else lists (chosen by auto)"
        return "lists (chosen by auto)" if self.chosen_by_auto else "lists"
