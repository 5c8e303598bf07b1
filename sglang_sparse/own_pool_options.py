"""Options of KV pools of our own, offload and split keys: what does not go together, and what they set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.option_values import (
    LARGEST,
    OptionsError,
    check_choice,
    check_int,
    check_number,
    flag,
    parse_memory,
)
from sglang_sparse.selection_options import FORECAST

if TYPE_CHECKING:
    from sglang_sparse.options import SparseDecodeOptions

KV_FORMATS = ("model", "split")
FLOAT8_HOST = "fp8_e4m3"
HOST_DTYPES = ("model", FLOAT8_HOST)


def check_offload(options: SparseDecodeOptions) -> None:
    """Checks the options of offload, and sets those whose defaults do not go with it."""
    if type(options.offload) is not bool:
        raise OptionsError(f"{flag('offload')} is {options.offload!r}: give true or false")
    _check_forecast(options)
    check_choice("host_dtype", options.host_dtype, HOST_DTYPES)
    given = {name: getattr(options, name) for name in ("host_memory", "hot_cache", "staging")}
    if options.host_dtype != type(options).host_dtype:
        given = {"host_dtype": options.host_dtype} | given
    for name, value in given.items():
        if value is None:
            continue
        if not options.offload:
            raise OptionsError(f"{flag(name)} has no effect without {flag('offload')}: add it or remove {flag(name)}")
        if name == "host_dtype":
            continue
        if name == "staging":
            check_int(name, value, 1)
        else:
            object.__setattr__(options, name, str(value))
            parse_memory(str(value), flag(name), 1, "what there is")
    shares = options.slot_shares
    if not isinstance(shares, (list, tuple)) or any(
        isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= LARGEST for share in shares
    ):
        raise OptionsError(f"config key 'slot_shares' is {shares!r}: give a number of 0 or more for each layer")
    if shares and not any(shares):
        raise OptionsError("config key 'slot_shares' has no share above 0: give one to layers that need slots")
    object.__setattr__(options, "slot_shares", tuple(shares))
    if options.slot_shares and not options.offload:
        raise OptionsError(f"config key 'slot_shares' has no effect without {flag('offload')}: remove it")
    if not options.offload:
        return
    if options.audit_rate == type(options).audit_rate:
        # The audit reads all keys of a request, which are not on the GPU.
        object.__setattr__(options, "audit_rate", 0.0)
    for wrong, name, instead in (
        (options.rule == "all", f"{flag('rule')} all", "coverage or top-k"),
        (options.rule == "coverage" and options.lowest_gamma == 1, f"{options.gamma_name} 1", "a share below 1"),
        (options.rule == "top-delta", f"{flag('rule')} top-delta", "coverage or top-k"),
        (bool(options.dense_layers), flag("dense_layers"), "a gamma near 1 for these layers"),
        (options.estimator == "exact", f"{flag('estimator')} exact", "thumbnail"),
        (options.audit_rate != 0, flag("audit_rate"), "0"),
    ):
        if wrong:
            raise OptionsError(f"{flag('offload')}: {name} reads keys of the GPU's pool: use {instead}")


def _check_forecast(options: SparseDecodeOptions) -> None:
    check_number("forecast_budget", options.forecast_budget)
    if options.forecast_budget <= 0:
        raise OptionsError(f"{flag('forecast_budget')} is {options.forecast_budget}: give MiB above 0")
    choice, has_budget = options.forecast, options.forecast_budget != type(options).forecast_budget
    if choice is not None and (not isinstance(choice, str) or not choice):
        raise OptionsError(f"{flag('forecast')} is {choice!r}: give none, query, or a file of trained heads")
    if options.offload:
        if has_budget and options.resolved_forecast == "none":
            raise OptionsError(
                f"{flag('forecast_budget')} has no effect with {flag('forecast')} none: name a forecast or remove "
                f"{flag('forecast_budget')}"
            )
        return
    selects = options.select_by == FORECAST
    for name, given in (("forecast", choice is not None and not selects), ("forecast_budget", has_budget)):
        if given:
            raise OptionsError(f"{flag(name)} has no effect without {flag('offload')}: add it or remove {flag(name)}")


def check_kv_format(options: SparseDecodeOptions) -> None:
    """Checks the format of keys, and sets the options whose defaults do not go with split ones."""
    check_choice("kv_format", options.kv_format, KV_FORMATS)
    if options.kv_format == "model":
        return
    if options.audit_rate == type(options).audit_rate:
        # The audit reads all keys of a request as they are.
        object.__setattr__(options, "audit_rate", 0.0)
    if options.thumbnail_bits == type(options).thumbnail_bits:
        object.__setattr__(options, "thumbnail_bits", 2)
    for wrong, name, instead in (
        (options.offload, f"{flag('offload')}, which keeps keys as they are", f"remove {flag('offload')}"),
        (
            options.path == "fused",
            f"{flag('path')} fused, which reads keys as they are",
            f"use {flag('path')} lists",
        ),
        (
            options.estimator != "thumbnail",
            f"{flag('estimator')} {options.estimator}",
            f"use {flag('estimator')} thumbnail, whose codes are part of the keys",
        ),
        (
            options.thumbnail_bits != 2,
            f"{flag('thumbnail_bits')} {options.thumbnail_bits}",
            f"use {flag('thumbnail_bits')} 2: the codes are part of the keys",
        ),
        (
            options.audit_rate != 0,
            f"{flag('audit_rate')} {options.audit_rate}, for which exact keys are read",
            f"use {flag('audit_rate')} 0",
        ),
    ):
        if wrong:
            raise OptionsError(f"{flag('kv_format')} split does not go with {name}: {instead}")
