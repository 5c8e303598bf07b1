"""What goes wrong with forecasts."""

from __future__ import annotations

from sglang_sparse.option_values import OptionsError


class ForecastError(OptionsError):
    """A forecast cannot be made, read, trained or evaluated. One line: what, why, and what to do."""
