"""Options of forecasts: what goes together, and what they become."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_sparse.option_sources import add_flags, pop_flags
from sglang_sparse.options import OptionsError, SparseDecodeOptions


def test_flags_and_transport() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = ("--sparse-decode", "--sparse-decode-offload", "--sparse-decode-forecast", "heads.safetensors")
    options = pop_flags(parser.parse_args([*flags, "--sparse-decode-forecast-budget", "2.5"]))
    assert options is not None
    assert (options.resolved_forecast, options.forecast_budget) == ("heads.safetensors", 2.5)
    assert SparseDecodeOptions.from_mapping(json.loads(options.to_json())) == options


def test_queries_are_forecast_where_there_is_something_to_prefetch() -> None:
    assert SparseDecodeOptions(offload=True).resolved_forecast == "query"
    assert SparseDecodeOptions(offload=True, forecast_budget=3).resolved_forecast == "query"
    assert SparseDecodeOptions(offload=True, forecast="heads").resolved_forecast == "heads"
    assert SparseDecodeOptions().resolved_forecast == "none"
    assert SparseDecodeOptions(offload=True, forecast="none").resolved_forecast == "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forecast": ""}, "--sparse-decode-forecast is '': give none, query, or a file of trained heads"),
        ({"forecast": 3}, "--sparse-decode-forecast is 3: give none"),
        ({"forecast_budget": 0}, "--sparse-decode-forecast-budget is 0: give MiB above 0"),
        ({"forecast_budget": "much"}, "--sparse-decode-forecast-budget is 'much': give a number"),
        ({"forecast": "query", "offload": False}, "--sparse-decode-forecast has no effect without --sparse-decode-off"),
        (
            {"forecast_budget": 3, "forecast": "none"},
            "--sparse-decode-forecast-budget has no effect with --sparse-decode-forecast none: name",
        ),
        (
            {"forecast_budget": 3, "offload": False},
            "--sparse-decode-forecast-budget has no effect without --sparse-dec",
        ),
    ],
)
def test_wrong_values_name_the_flag(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        SparseDecodeOptions(**{"offload": True, **change})


def test_a_file_of_heads_has_to_be_there(tmp_path: Path) -> None:
    file = tmp_path / "heads.safetensors"
    for name in (str(file), "QUERY", "x" * 300):
        options = SparseDecodeOptions(offload=True, forecast=name)
        with pytest.raises(OptionsError, match=f"--sparse-decode-forecast {name}: there is no such file: give none"):
            options.check_forecast_file()
    file.touch()
    for name in (str(file), "none", "query", None):
        SparseDecodeOptions(offload=True, forecast=name).check_forecast_file()
