"""Totals of a step, once a step for all layers. Bytes: the lengths and the totals; what counts is the launch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels.step_totals import FIELDS, step_totals, step_totals_reference

from .common import Measurement, Suite, time_in_turn


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size; the context only sets the lengths."""
    for size, context in suite.cases():
        lengths = torch.full((size,), context, dtype=torch.int32, device=suite.device)
        totals = torch.zeros(len(FIELDS), dtype=torch.int64, device=suite.device)
        settings = {"page_size": suite.page_size, "block_size": suite.block_size, "min_context": 4096}
        call = partial(step_totals, lengths, totals=totals, **settings)
        call()
        expected = torch.zeros_like(totals)
        step_totals_reference(lengths, totals=expected, **settings)
        if not torch.equal(totals, expected):
            raise RuntimeError(f"step_totals B={size} context={context} differs from the reference")
        moved = lengths.nbytes + 2 * totals.nbytes
        yield Measurement("step_totals", "", size, context, None, time_in_turn([call]), moved)
