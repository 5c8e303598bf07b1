"""Forecasts in a server: what SGLang's model is asked for, and where its layers' inputs are noted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.options import SparseDecodeOptions, flag
from sglang_sparse.selection_options import FORECAST

from .choice import NONE, QUERY, make_forecast
from .chooser import ForecastChooser
from .errors import ForecastError
from .lookahead import SCORE_BYTES, Lookahead
from .model_parts import ModelParts, parts_of_sglang
from .projections import OneVector
from .protocol import Forecast

if TYPE_CHECKING:
    from sglang_sparse.decode_step import DecodeStep
    from sglang_sparse.offload.decode import OffloadedDecode

logger = logging.getLogger(__name__)

MIB = 1 << 20


def install_forecast(model: Any, step: DecodeStep, options: SparseDecodeOptions) -> None:
    """Makes `step` rank blocks by the options' forecast, if they say so; before graphs are captured.

    Raises ForecastError if the forecast cannot be had.

    Args:
        model: SGLang's, with its weights.
    """
    if options.select_by == FORECAST and step.sparse_layers:
        _install_chooser(*_forecast(model, options), step, options)


def install_forecasts(model: Any, decode: OffloadedDecode, options: SparseDecodeOptions, scales: list[float]) -> None:
    """As `install_forecast`, and makes the steps of `decode` prefetch what the forecast names.

    Raises ForecastError if a forecast that was asked for cannot be had. Without the default one nothing is prefetched,
    and a warning says so.

    Args:
        scales: of each layer's attention.
    """
    if options.resolved_forecast == NONE:
        return
    try:
        parts, forecast = _forecast(model, options)
    except ForecastError as error:
        if options.forecast is not None or options.select_by == FORECAST:
            raise
        logger.warning(
            "Sparse decode prefetches nothing, so that steps wait for each block they miss, and what was reserved for "
            "a forecast stays unused: %s",
            error,
        )
        return
    if options.select_by == FORECAST:
        _install_chooser(parts, forecast, decode, options)
    block = decode.missed_block_bytes
    budget = max(1, int(options.forecast_budget * MIB) // block)
    on_gpu = decode.buffers.seq_lens.is_cuda
    lookahead = Lookahead(
        forecast,
        decode,
        scales=scales,
        hidden=parts.hidden_size,
        dtype=parts.layers[0].projection.weight.dtype,
        budget=budget,
        least=-(-SCORE_BYTES // block) if on_gpu else 1,
    )
    _note_inputs(parts, lookahead.note)
    decode.lookahead = lookahead
    logger.info(
        "Sparse decode forecasts %d of %d layers by %s, weights %.3f GB, at most %d blocks a layer and step.",
        len([layer for layer in range(len(parts.layers)) if layer in forecast]),
        len(parts.layers),
        forecast.name,
        forecast.bytes / 1e9,
        budget,
    )


def _forecast(model: Any, options: SparseDecodeOptions) -> tuple[ModelParts, Forecast]:
    parts = parts_of_sglang(model)
    forecast = make_forecast(options.resolved_forecast, parts, flag("forecast"))
    assert forecast is not None
    if options.select_by == FORECAST and options.resolved_forecast == QUERY:
        forecast = OneVector(forecast)
    return parts, forecast


def _install_chooser(parts: ModelParts, forecast: Forecast, step: DecodeStep, options: SparseDecodeOptions) -> None:
    step.chooser = ForecastChooser(
        forecast,
        step.geometry,
        max_requests=step.buffers.max_requests,
        hidden=parts.hidden_size,
        dtype=parts.layers[0].projection.weight.dtype,
        device=step.buffers.seq_lens.device,
    )
    _note_inputs(parts, step.chooser.note)
    logger.warning(
        "Sparse decode reads what a forecast of the layer before chooses (%s forecast; %s): a baseline after SparDA, "
        "to compare with. It changes the output.",
        flag("select_by"),
        forecast.name,
    )


def _note_inputs(parts: ModelParts, note: Callable[[int, torch.Tensor], None]) -> None:
    """Has each layer's input noted as its query projection gets it."""
    for index, layer in enumerate(parts.layers):

        def hook(module: Any, arguments: tuple, index: int = index) -> None:
            note(index, arguments[0])

        layer.attention.qkv_proj.register_forward_pre_hook(hook)
