"""What a server does with a model that has no forecasts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.forecast.errors import ForecastError
from sglang_sparse.forecast.server import install_forecasts
from sglang_sparse.observe.report import forecast_in_use
from sglang_sparse.options import SparseDecodeOptions


class GraniteForCausalLM:
    """Of an architecture that forecasts do not know."""


def install(**options: Any) -> SimpleNamespace:
    decode = SimpleNamespace(lookahead=None, chooser=None)
    install_forecasts(GraniteForCausalLM(), decode, SparseDecodeOptions(offload=True, **options), [1.0])  # type: ignore[arg-type]
    return decode


def test_without_the_default_forecast_nothing_is_prefetched_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decode = install()
    assert decode.lookahead is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "Sparse decode prefetches nothing, so that steps wait for each block they miss, and what was reserved for a "
        "forecast stays unused: there are no forecasts for GraniteForCausalLM: use --sparse-decode-forecast none, or "
        "one of LlamaForCausalLM"
    )


def test_with_none_there_is_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    assert install(forecast="none").lookahead is None
    assert not caplog.records


@pytest.mark.parametrize(
    "options", [{"forecast": "query"}, {"forecast": "heads.safetensors"}, {"select_by": "forecast"}]
)
def test_a_forecast_that_was_asked_for_is_not_left_out(options: dict[str, Any]) -> None:
    with pytest.raises(ForecastError, match="there are no forecasts for GraniteForCausalLM"):
        install(**options)


@pytest.mark.parametrize(
    ("totals", "chooser", "shown"), [(None, None, "none"), (torch.zeros(1, 2), None, "query"), (None, "any", "query")]
)
def test_what_is_reported_is_the_forecast_that_there_is(totals: Any, chooser: Any, shown: str) -> None:
    step = SimpleNamespace(forecast_totals=totals, chooser=chooser, options=SparseDecodeOptions(offload=True))
    assert forecast_in_use(step) == shown  # type: ignore[arg-type]
