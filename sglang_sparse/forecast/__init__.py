"""Forecast: which KV blocks the next layer will read, named one layer early. It decides what is prefetched, and nothing
else: what attention reads is chosen by the true queries, except by `chooser`, a baseline."""

from .errors import ForecastError
from .protocol import Forecast

__all__ = ["Forecast", "ForecastError"]
