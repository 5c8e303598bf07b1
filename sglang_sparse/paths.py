"""Which way rule `top-delta` takes through a layer: block lists, or the fused pass.

By way of lists a layer estimates, lists and attends in turn; the fused pass does all three in one launch and a combine
(`fused_top_delta`). Other rules have block lists only. A CUDA graph is captured for each batch size, so that the choice
by batch size costs nothing at run time.
"""

from __future__ import annotations

from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.selection_options import THUMBNAILS

FUSED_BATCHES: dict[tuple[int, bool], tuple[int, ...]] = {
    (2, False): (1, 2, 4),
    (2, True): (1, 2, 4),
    (4, False): (1,),
    (4, True): (1,),
}
"""By bits of the thumbnails and whether there is a tail, the batches for which `auto` takes the fused pass: those for
which it was nowhere more than 1.5% slower than lists, at lengths from 8,192 to 262,144 tokens and kept shares from 5 to
100%, a real model's heads among them, by `python -m benchmarks kernel fused_top_delta` on an H200. With 4 bits it is
faster for batches 2 and 4 too, up to 130,000 and 32,768 tokens (docs/performance.md). Measured were batches 1, 2 and 4,
and 2 and 4 bits."""


def can_fuse(options: SparseDecodeOptions) -> bool:
    """Whether there is a fused pass for the rule and the estimator."""
    return options.rule == "top-delta" and options.estimator in THUMBNAILS


def always_fused(options: SparseDecodeOptions) -> bool:
    """Whether all batches take the fused pass."""
    return can_fuse(options) and options.path == "fused"


def fused_batches(options: SparseDecodeOptions) -> tuple[int, ...]:
    """Batches for which `auto`, if it is what chooses, takes the fused pass; ascending."""
    if not can_fuse(options) or options.path != "auto":
        return ()
    return FUSED_BATCHES.get((options.thumbnail_bits, options.resolved_tail != "drop"), ())


def takes_fused(options: SparseDecodeOptions, batch: int) -> bool:
    """Whether a batch of `batch` requests takes the fused pass."""
    return always_fused(options) or batch in fused_batches(options)


def most_fused(options: SparseDecodeOptions, max_requests: int) -> int:
    """The largest batch that takes the fused pass, of batches up to `max_requests`; 0 if none does."""
    if always_fused(options):
        return max_requests
    return max((batch for batch in fused_batches(options) if batch <= max_requests), default=0)


def ever_lists(options: SparseDecodeOptions) -> bool:
    """Whether some batch takes block lists."""
    return not always_fused(options)


def describe(options: SparseDecodeOptions) -> str:
    """The paths of the options, for the log."""
    if always_fused(options):
        return "fused"
    if batches := fused_batches(options):
        return f"fused at batch {', '.join(map(str, batches))}, else lists (chosen by auto)"
    return "lists (chosen by auto)" if can_fuse(options) and options.path == "auto" else "lists"
