"""From what `--sparse-decode-forecast` names to a forecast."""

from __future__ import annotations

from pathlib import Path

from .heads_file import read_heads
from .model_parts import ModelParts
from .projections import heads_forecast, query_forecast
from .protocol import Forecast

NONE, QUERY = "none", "query"


def make_forecast(choice: str, parts: ModelParts, flag: str) -> Forecast | None:
    """`none` (None), `query`, or the heads of the file that `choice` names.

    Raises ForecastError, which begins with `flag`, if the file does not fit the model.
    """
    if choice == NONE:
        return None
    if choice == QUERY:
        return query_forecast(parts)
    return heads_forecast(parts, read_heads(Path(choice), parts, flag))
