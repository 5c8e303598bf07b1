"""The `sparse_decode` block of `/server_info` and the log line beside SGLang's decode line."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import torch

from sglang_sparse import sglang_compat
from sglang_sparse.backend import SparseDecodeBackend
from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.observe.counters import Reading
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.self_check import SELF_CHECK_VARIABLE

logger = logging.getLogger(__name__)


def server_info(backend: SparseDecodeBackend, scheduler: Any) -> dict[str, Any]:
    """The `sparse_decode` block of one scheduler's internal state; JSON types only."""
    reading = backend.step.counters.read()
    options = backend.step.options
    block: dict[str, Any] = {
        "options": json.loads(options.to_json())
        | {"tail": options.resolved_tail, "delta": _delta(options), "forecast": forecast_in_use(backend.step)},
        "tp_size": 1,
        "page_size": backend.step.geometry.page_size,
        "summary_bytes": backend.step.summaries.bytes,
        "steps": reading.steps,
        "decoded_tokens": reading.requests,
        "tokens": reading.tokens,
        "blocks": reading.blocks,
        "kept_fraction": reading.kept_fraction,
        "bytes_read_fraction": reading.bytes_read_fraction,
        "kept_fraction_by_layer_and_head": reading.kept_by_layer_and_head,
        "audit": backend.audit.report() if backend.audit is not None else None,
        "control": backend.step.control.report(),
        "offload": backend.offload_report(),
    }
    if os.environ.get(SELF_CHECK_VARIABLE) == "1":
        block["self_check"] = self_check(backend, scheduler)
    return block


def forecast_in_use(step: DecodeStep) -> str:
    """What forecasts in fact: a model may have none where the options ask for nothing."""
    return "none" if step.forecast_totals is None and step.chooser is None else step.options.resolved_forecast


def _delta(options: SparseDecodeOptions) -> float | None:
    return options.resolved_delta if options.rule == "top-delta" else None


def live_state(backend: SparseDecodeBackend, scheduler: Any) -> dict[str, Any]:
    """What `/sparse_decode` shows: the block of `/server_info`, and what was read since settings changed last."""
    waiting = backend.step.control.is_waiting
    reading = Reading(0, None, None, []) if waiting else backend.step.counters.read_since_mark()
    since_change = {
        "steps": reading.steps,
        "kept_fraction": reading.kept_fraction,
        "bytes_read_fraction": reading.bytes_read_fraction,
        "kept_fraction_by_layer_and_head": reading.kept_by_layer_and_head,
    }
    return server_info(backend, scheduler) | {"since_change": since_change}


def self_check(backend: SparseDecodeBackend, scheduler: Any) -> dict[str, int | None]:
    """Compares the summaries of all live closed pages with ones made anew from the KV pool; None for stale pages if the
    pool is rounded.

    Also counts what the pools hold, so that an idle server can be checked for leaks. Slow; waits for the device.
    """
    pool = backend.kv_pool
    if pool.device != "cpu":
        torch.get_device_module(pool.device).synchronize()
    pages = sglang_compat.live_closed_pages(scheduler, backend.step.geometry.page_size)
    summaries = backend.step.summaries
    stale = {
        layer: summaries.stale_pages(layer, *backend.pool_copies(layer), pages)
        for layer in range(pool.layer_num)
        if layer in summaries and backend.copies_are_exact
    }
    return {
        "live_closed_pages": len(pages),
        "stale_pages": max(stale.values(), default=0) if backend.copies_are_exact else None,
        "wrong_slots": backend.check_slots(),
        **sglang_compat.pool_usage(scheduler),
    }


def decode_line(reading: Reading) -> str | None:
    """The log line for the steps since the last one; None if there was no step."""
    if reading.kept_fraction is None or reading.bytes_read_fraction is None:
        return None
    return (
        f"Sparse decode, #steps: {reading.steps}, kept: {reading.kept_fraction:.3f}, "
        f"bytes read: {reading.bytes_read_fraction:.3f}"
    )


def log_decode(backend: SparseDecodeBackend) -> None:
    """Logs what the steps of the last interval read, if there were any."""
    reading = backend.step.counters.read_recent()
    line = decode_line(reading)
    if line:
        logger.info(line)
    backend.after_log(reading.steps)
