"""What ranks blocks: which options go with a forecast that selects, and with an estimator that only ranks."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_sparse import memory
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import OptionsError, SparseDecodeOptions

SELECT = "--sparse-decode-select-by forecast"
STRIDED = "--sparse-decode-estimator strided-mean"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select_by": "keys"}, "--sparse-decode-select-by is 'keys': choose one of query, forecast"),
        ({"rule": "top-delta"}, f"{SELECT} does not go with --sparse-decode-rule top-delta"),
        ({"rule": "all"}, f"{SELECT} does not go with --sparse-decode-rule all, which ranks nothing by it"),
        ({"tail": "mean"}, f"{SELECT} does not go with --sparse-decode-tail mean"),
        ({"kv_format": "split"}, f"{SELECT} does not go with --sparse-decode-kv-format split"),
        ({"forecast": "none"}, f"{SELECT} does not go with --sparse-decode-forecast none: name a forecast"),
        ({"forecast": 3}, "--sparse-decode-forecast is 3: give none, query, or a file of trained heads"),
        ({"forecast_budget": 2.0}, "--sparse-decode-forecast-budget has no effect without --sparse-decode-offload"),
    ],
)
def test_what_a_forecast_that_selects_does_not_go_with(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError) as error:
        SparseDecodeOptions(**{"select_by": "forecast", **options})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, f"{STRIDED} ranks blocks and estimates no mass, which --sparse-decode-rule coverage needs"),
        ({"rule": "top-k", "top_k": 4, "block_size": 8}, f"{STRIDED} does not go with --sparse-decode-block-size 8"),
        ({"rule": "top-k", "top_k": 4, "tail": "mean"}, "--sparse-decode-tail mean needs better mass estimates"),
    ],
)
def test_what_strided_means_do_not_go_with(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError) as error:
        SparseDecodeOptions(**{"estimator": "strided-mean", **options})
    assert str(error.value).startswith(message)


def test_what_selects_has_a_forecast_and_no_tail() -> None:
    options = SparseDecodeOptions(select_by="forecast")
    assert (options.resolved_forecast, options.resolved_tail) == ("query", "drop")
    assert SparseDecodeOptions().resolved_forecast == "none"
    both = SparseDecodeOptions(select_by="forecast", offload=True, forecast_budget=2.0)
    assert (both.resolved_forecast, both.audit_rate) == ("query", 0)


def test_inputs_of_layers_are_reserved() -> None:
    import torch

    geometry = Geometry(2, 3, 64, torch.bfloat16, 64, 16)

    def reserved(hidden_size: int, **options: Any) -> int:
        sizes = {"layers": 4, "max_pages": 16, "max_requests": 5, "hidden_size": hidden_size}
        return memory.step_buffer_bytes(SparseDecodeOptions(**options), geometry, **sizes)

    for users, options in enumerate(({}, {"select_by": "forecast"}, {"select_by": "forecast", "offload": True})):
        assert reserved(1000, **options) - reserved(0, **options) == users * 2 * 5 * 1000 * 2
