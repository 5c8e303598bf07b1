"""A lap of the stopwatch: five in a step while metrics are exported. Bytes do not matter; what counts is the launch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import stopwatch, stopwatch_state

from .common import Measurement, Suite, time_in_turn


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size, which makes no difference."""
    for size, context in suite.cases():
        lengths = torch.full((size,), context, dtype=torch.int32, device=suite.device)
        state = stopwatch_state(1, suite.device)
        lap = partial(stopwatch, lengths, state, phase=0)
        yield Measurement(
            "stopwatch", "", size, context, None, time_in_turn([lap]), lengths.element_size() + state.nbytes
        )
