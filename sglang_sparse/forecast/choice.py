"""From what `--sparse-decode-forecast` names to a forecast."""

from __future__ import annotations

from pathlib import Path

from .heads_file import read_heads
from .model_parts import ModelParts
from .projections import ProjectedForecast, heads_forecast, query_forecast
from .protocol import Forecast

NONE, QUERY = "none", "query"


def make_forecast(choice: str, parts: ModelParts, flag: str) -> Forecast | None:
    """`none` (None), `query`, or the heads of the file that `choice` names.

    Raises ForecastError, which begins with `flag`, if the file does not fit the model.
    """
    if choice == NONE:
        return None
    made: ProjectedForecast
    if choice == QUERY:
        made = query_forecast(parts)
    else:
        made = heads_forecast(parts, read_heads(Path(choice), parts, flag))
    return made
