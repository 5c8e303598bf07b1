"""Coverage rule in clusters of thread blocks, by kind. Bytes: the log masses once, and the lists."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from sparse_kernels import coverage_rule, coverage_rule_reference
from sparse_kernels._cluster_launch import cluster_sizes
from sparse_kernels._select_cluster import MAX_SEGMENT, launch_select_cluster, segment_size

from .common import Measurement, Suite
from .rules import SINGLE, measure_rule

WAYS = ((4, 8), (4, 16), (8, 8), (8, 16), (8, 32), (16, 8), (16, 16))
"""Warps of a thread block, and thresholds of a pass."""


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures one block a row, and every size that the device takes with each of `WAYS`, every batch and context."""
    case, target, group = "gamma 0.95, average, mask", {"gamma": 0.95}, "average"
    yield from measure_rule(
        suite, "coverage_rule", case, coverage_rule, coverage_rule_reference, target, group, with_mask=True, impl=SINGLE
    )
    longest = suite.capacity(max(suite.contexts))
    for size in cluster_sizes(torch.device(suite.device)):
        if segment_size(longest, size) > MAX_SEGMENT:
            continue
        for warps, thresholds in WAYS:
            yield from measure_rule(
                suite,
                "coverage_rule",
                case,
                partial(_in_clusters, size, warps, thresholds),
                coverage_rule_reference,
                target,
                group,
                with_mask=True,
                impl=f"clusters of {size}, {warps} warps, {thresholds} thresholds",
            )


def _in_clusters(size: int, warps: int, thresholds: int, log_mass: torch.Tensor, **given: Any) -> None:
    """`coverage_rule` in clusters of a given kind, short rows too."""
    launch_select_cluster(
        log_mass,
        given["seq_lens"],
        given["gamma"],
        False,
        *(given[name] for name in ("page_size", "block_size", "sink_tokens", "window_tokens", "min_context")),
        given["block_lists"],
        given["block_counts"],
        given["scratch"],
        None,
        given["kept_mask"],
        given["tap"],
        size,
        short=0,
        thresholds=thresholds,
        warps=warps,
    )
