"""Room for summaries and step buffers, taken out of the memory that SGLang gives to the KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sparse_kernels import AttentionWorkspace, ExpectedWorkspace

from sglang_sparse.fused import FusedPass
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.paths import Paths
from sglang_sparse.selection import make_estimator, make_rule
from sglang_sparse.selection_options import FORECAST
from sglang_sparse.tail import make_tail

MAX_STEP_BYTES = 256 << 20
"""The step's per-request buffers are sized for as many requests as fit; larger batches are served in turns."""


def step_bytes_per_request(geometry: Geometry, max_pages: int, has_tail: bool, has_maxima: bool = False) -> int:
    """Bytes of log-masses, scratch and list that one request of `max_pages` pages needs, with a tail also of the mask
    of blocks, and with maxima of those."""
    per_block = (geometry.group_size * (1 + has_maxima) + 2) * 4 + has_tail
    per_row = max_pages * geometry.blocks_per_page * per_block + has_maxima * geometry.group_size * 4
    return geometry.kv_heads * per_row


def requests_per_turn(
    geometry: Geometry, max_pages: int, max_requests: int, has_tail: bool, has_maxima: bool = False
) -> int:
    """How many requests are selected and attended together."""
    each = step_bytes_per_request(geometry, max_pages, has_tail, has_maxima)
    return max(1, min(max_requests, MAX_STEP_BYTES // each))


def audit_bytes(geometry: Geometry, max_pages: int) -> int:
    """Bytes that the live audit of a request of `max_pages` pages needs.

    Lists and their indices, one page table, the log masses, and up to four tensors of their size for the coverage.
    """
    blocks = max_pages * geometry.blocks_per_page
    return blocks * geometry.kv_heads * (5 * geometry.group_size + 6) * 4 + max_pages * 4


def forecast_bytes(geometry: Geometry, max_pages: int, max_requests: int) -> int:
    """Bytes that prefetching by forecasts needs at most, beside trained weights and the inputs of a step: masses,
    workspace, lists and counts."""
    blocks = max_pages * geometry.blocks_per_page
    turn = requests_per_turn(geometry, max_pages, max_requests, False)
    masses = turn * geometry.kv_heads * blocks * geometry.group_size * 4
    workspace = ExpectedWorkspace.bytes(turn, geometry.kv_heads, blocks)
    return masses + workspace + max_requests * geometry.kv_heads * (blocks + 1) * 4


class SparsePoolConfigurator:
    """SGLang's KV pool configurator, told of less memory: what is left after summaries and step buffers.

    Args:
        inner: the configurator SGLang chose.
        summary_share: summary bytes ÷ KV bytes of a token.
        reserved_bytes: memory that does not grow with the pool.
    """

    def __init__(self, inner: Any, summary_share: float, reserved_bytes: int) -> None:
        self._inner = inner
        self._summary_share = summary_share
        self._reserved_bytes = reserved_bytes

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> Any:
        left = max(0, available_bytes - self._reserved_bytes)
        return self._inner.calculate_pool_sizes(int(left / (1 + self._summary_share)), page_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def reserve(
    inner: Any,
    options: SparseDecodeOptions,
    *,
    geometry: Geometry,
    layers: int,
    max_pages: int,
    max_requests: int,
    hidden_size: int = 0,
    device: torch.device | str = "cpu",
    windows: frozenset[int] = frozenset(),
) -> Any:
    """`inner`, SGLang's KV pool configurator, with the memory of sparse decode taken out of its budget.

    Args:
        layers: attention layers of the model.
        max_pages: pages of the longest request.
        max_requests: upper bound of the request slots, known before the pool is sized.
        hidden_size: width of the model, for the inputs of layers that forecasts keep.
        device: where the steps run.
        windows: the layers with a sliding window, which have no summaries.
    """
    rule = make_rule(options, geometry)
    if not rule.needs_mass:
        return inner
    sparse_layers = layers - len(windows.union(options.dense_layers))
    tail = make_tail(options, geometry)
    summary_bytes = make_estimator(options, geometry).summary_bytes() + (tail.summary_bytes() if tail else 0)
    share = summary_bytes * sparse_layers / (geometry.kv_bytes * layers)
    reserved = step_buffer_bytes(
        options,
        geometry,
        layers=layers,
        max_pages=max_pages,
        max_requests=max_requests,
        hidden_size=hidden_size,
        device=device,
    )
    return SparsePoolConfigurator(inner, share, reserved)


def workspace_bytes(
    options: SparseDecodeOptions, geometry: Geometry, max_requests: int, device: torch.device | str
) -> int:
    """Bytes in which the attention kernels leave the parts of shared rows; by the device's multiprocessors."""
    attention = AttentionWorkspace.create(None, geometry.group_size, geometry.head_dim, device).nbytes
    fused_requests = Paths.of(options, geometry, device).most_fused(max_requests)
    if fused_requests:
        attention += FusedPass(options, geometry, fused_requests, device).workspace.nbytes
    return attention


def step_buffer_bytes(
    options: SparseDecodeOptions,
    geometry: Geometry,
    *,
    layers: int,
    max_pages: int,
    max_requests: int,
    hidden_size: int = 0,
    device: torch.device | str = "cpu",
) -> int:
    """Bytes that steps and audit need, whatever the pool holds; arguments as for `reserve`."""
    reserved = workspace_bytes(options, geometry, max_requests, device)
    paths = Paths.of(options, geometry, device)
    if paths.ever_lists:
        sizes = (make_tail(options, geometry) is not None, make_rule(options, geometry).needs_maxima)
        turn = requests_per_turn(geometry, max_pages, max_requests, *sizes)
        reserved += turn * step_bytes_per_request(geometry, max_pages, *sizes)
    # Page tables; thresholds and counts of each layer and KV head; what each request read.
    reserved += max_requests * ((max_pages + 2 * layers * geometry.kv_heads) * 4 + 16)
    # What each layer and KV head kept in the last fused step.
    reserved += paths.most_fused(max_requests) * layers * geometry.kv_heads * 4
    if options.offload:
        # Where each listed block is.
        reserved += max_requests * max_pages * geometry.blocks_per_page * geometry.kv_heads * 4
        if options.resolved_forecast != "none":
            reserved += forecast_bytes(geometry, max_pages, max_requests)
    if options.resolved_forecast != "none":
        heads = Path(options.resolved_forecast)
        # `check_forecast_file` has refused one that is not there: else it is `query`.
        reserved += heads.stat().st_size if heads.is_file() else 0
        # Inputs of two layers for each of what prefetches and what selects.
        users = int(options.offload) + int(options.select_by == FORECAST)
        reserved += users * 2 * max_requests * hidden_size * geometry.dtype.itemsize
    if options.audit_rate > 0:
        reserved += audit_bytes(geometry, max_pages)
    return reserved
