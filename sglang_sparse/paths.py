"""Which way rule `top-delta` takes through a layer: block lists, or the fused pass.

By way of lists a layer estimates, lists and attends in turn; the fused pass does all three in one launch and a combine
(`fused_top_delta`). Other rules have block lists only. A CUDA graph is captured for each batch size, so that the choice
by batch size costs nothing at run time.
"""

from __future__ import annotations

from sglang_sparse.options import SparseDecodeOptions

FUSED_UP_TO = {(2, True): 4, (2, False): 4, (4, True): 1}
"""By bits of the thumbnails and whether there is a tail, the largest batch for which `auto` takes the fused pass: the
largest where it was not slower than lists at any length and kept share, a real model's heads among them, that `python
-m benchmarks kernel fused_top_delta` was run with on an H200 (docs/performance.md). Without the tail and with 4 bits it
is up to 4% slower at batch 1; neither three bits nor batches above 4 were measured."""


def fused_up_to(options: SparseDecodeOptions) -> int:
    """Largest batch for which `auto` takes the fused pass; 0 for none."""
    return FUSED_UP_TO.get((options.thumbnail_bits, options.resolved_tail != "drop"), 0)


def can_fuse(options: SparseDecodeOptions) -> bool:
    """Whether there is a fused pass for the rule and the estimator."""
    return options.rule == "top-delta" and options.estimator == "thumbnail"


def takes_fused(options: SparseDecodeOptions, batch: int) -> bool:
    """Whether a batch of `batch` requests takes the fused pass."""
    if not can_fuse(options) or options.path == "lists":
        return False
    return options.path == "fused" or batch <= fused_up_to(options)


def ever_fused(options: SparseDecodeOptions) -> bool:
    """Whether any batch takes the fused pass."""
    return takes_fused(options, 1)


def most_fused(options: SparseDecodeOptions, max_requests: int) -> int:
    """The largest batch that takes the fused pass, of batches up to `max_requests`; 0 if none does."""
    if not ever_fused(options):
        return 0
    return max_requests if options.path == "fused" else min(max_requests, fused_up_to(options))


def ever_lists(options: SparseDecodeOptions) -> bool:
    """Whether some batch takes block lists."""
    return not (can_fuse(options) and options.path == "fused")


def describe(options: SparseDecodeOptions) -> str:
    """The paths of the options, for the log."""
    if not ever_fused(options):
        return "lists (chosen by auto)" if can_fuse(options) and options.path == "auto" else "lists"
    return f"fused up to batch {fused_up_to(options)}, then lists (chosen by auto)" if ever_lists(options) else "fused"
