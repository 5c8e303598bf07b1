"""Options of what ranks blocks, queries or a forecast of them, and of estimators that only rank: what goes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.option_values import OptionsError, check_choice, flag

if TYPE_CHECKING:
    from sglang_sparse.options import SparseDecodeOptions

QUERY, FORECAST = "query", "forecast"
SELECT_BY = (QUERY, FORECAST)
STRIDED_MEAN = "strided-mean"
FFD = "ffd"
THUMBNAILS = ("thumbnail", FFD)
"""Estimators whose summaries are low-bit copies of the keys, asymmetric ones and FFD's symmetric ones."""
STRIDED_BLOCK_SIZES = (16, 32, 64)


def check_selection(options: SparseDecodeOptions) -> None:
    """Raises OptionsError unless the estimator, and what ranks blocks by it, go with the other options."""
    check_choice("select_by", options.select_by, SELECT_BY)
    if options.estimator == STRIDED_MEAN:
        _check_strided_mean(options)
    if options.estimator == FFD:
        _check_ffd(options)
    if options.select_by == FORECAST:
        _check_forecast(options)


def _check_strided_mean(options: SparseDecodeOptions) -> None:
    name = flag("estimator")
    if options.rule not in ("top-k", "all"):
        raise OptionsError(
            f"{name} strided-mean ranks blocks and estimates no mass, which {flag('rule')} {options.rule} needs: "
            f"use {flag('rule')} top-k, or another estimator"
        )
    if options.block_size not in STRIDED_BLOCK_SIZES:
        raise OptionsError(
            f"{name} strided-mean does not go with {flag('block_size')} {options.block_size}: "
            f"use one of {', '.join(map(str, STRIDED_BLOCK_SIZES))}"
        )


def check_ffd_bits(bits: int) -> None:
    """Raises OptionsError unless these are the bits of FFD's codes."""
    if bits != 2:
        raise OptionsError(
            f"{flag('estimator')} ffd does not go with {flag('thumbnail_bits')} {bits}: "
            f"use {flag('thumbnail_bits')} 2, or {flag('estimator')} thumbnail"
        )


def _check_ffd(options: SparseDecodeOptions) -> None:
    """FFD's codes have two bits, which is what the option's default stands for here; `merge` refuses a given one."""
    if options.thumbnail_bits == type(options).thumbnail_bits:
        object.__setattr__(options, "thumbnail_bits", 2)
    check_ffd_bits(options.thumbnail_bits)


def _check_forecast(options: SparseDecodeOptions) -> None:
    name = flag("select_by")
    for wrong, what, instead in (
        (
            options.rule not in ("top-k", "coverage"),
            f"{flag('rule')} {options.rule}, which ranks nothing by it",
            f"use {flag('rule')} top-k or coverage",
        ),
        (
            options.tail == "mean",
            f"{flag('tail')} mean, whose weights are those of the queries",
            f"use {flag('tail')} drop",
        ),
        (
            options.kv_format == "split",
            f"{flag('kv_format')} split, with which it has not been tested",
            f"use {flag('kv_format')} model",
        ),
        (options.forecast == "none", f"{flag('forecast')} none", f"name a forecast, or use {flag('select_by')} query"),
    ):
        if wrong:
            raise OptionsError(f"{name} forecast does not go with {what}: {instead}")
