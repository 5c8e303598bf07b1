"""Forecasts in a server: what SGLang's model is asked for, and where its layers' inputs are noted."""

from __future__ import annotations

import logging
from typing import Any

from sglang_sparse.offload.decode import OffloadedDecode
from sglang_sparse.options import SparseDecodeOptions, flag

from .choice import NONE, make_forecast
from .lookahead import Lookahead
from .model_parts import parts_of_sglang

logger = logging.getLogger(__name__)

MIB = 1 << 20


def install_lookahead(model: Any, decode: OffloadedDecode, options: SparseDecodeOptions, scales: list[float]) -> None:
    """Makes the steps of `decode` prefetch what the options' forecast names; before graphs are captured.

    Raises ForecastError if the forecast that was asked for cannot be had.

    Args:
        model: SGLang's, with its weights.
        scales: of each layer's attention.
    """
    if options.resolved_forecast == NONE:
        return
    parts = parts_of_sglang(model)
    forecast = make_forecast(options.resolved_forecast, parts, flag("forecast"))
    assert forecast is not None
    budget = max(1, int(options.forecast_budget * MIB) // decode.missed_block_bytes)
    lookahead = Lookahead(
        forecast,
        decode,
        scales=scales,
        hidden=parts.hidden_size,
        dtype=parts.layers[0].projection.weight.dtype,
        budget=budget,
    )
    for index, layer in enumerate(parts.layers):

        def note(module: Any, arguments: tuple, index: int = index) -> None:
            lookahead.note(index, arguments[0])

        layer.attention.qkv_proj.register_forward_pre_hook(note)
    decode.lookahead = lookahead
    logger.info(
        "Sparse decode forecasts %d of %d layers by %s, weights %.3f GB, at most %d blocks a layer and step.",
        len([layer for layer in range(len(parts.layers)) if layer in forecast]),
        len(parts.layers),
        forecast.name,
        forecast.bytes / 1e9,
        budget,
    )
