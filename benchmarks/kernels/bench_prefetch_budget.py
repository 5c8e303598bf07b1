"""Budgets of 32 layers as a step begins. Bytes: totals, state and lengths; what counts is the launch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import prefetch_budget, prefetch_state, stopwatch_state

from .common import Measurement, Suite, time_in_turn

LAYERS = 32


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size; the context only sets the lengths."""
    for size, context in suite.cases():
        lengths = torch.full((size,), context, dtype=torch.int32, device=suite.device)
        demand = torch.zeros((LAYERS, 4), dtype=torch.int64, device=suite.device)
        forecasts = torch.zeros((LAYERS, 2), dtype=torch.int64, device=suite.device)
        state = prefetch_state(LAYERS, 1024, suite.device)
        outputs = {
            "budgets": torch.zeros(LAYERS, dtype=torch.int32, device=suite.device),
            "lengths": torch.zeros((LAYERS, size), dtype=torch.int32, device=suite.device),
        }
        call = partial(
            prefetch_budget,
            lengths,
            demand,
            forecasts,
            clock=stopwatch_state(1, suite.device),
            state=state,
            least=1,
            most=1024,
            bytes_per_microsecond=38_000,
            block_bytes=8192,
            page_size=suite.page_size,
            min_context=0,
            **outputs,
        )
        call()
        # Three quarters of 1024 are lacked, and half as much again is the budget, which is bounded.
        if outputs["budgets"].tolist() != [1024] * LAYERS or not torch.equal(outputs["lengths"][-1], lengths):
            raise RuntimeError(f"prefetch_budget B={size}: {outputs['budgets'].tolist()}")
        moved = sum(tensor.nbytes for tensor in (lengths, demand, forecasts, state, *outputs.values()))
        yield Measurement("prefetch_budget", "", size, context, None, time_in_turn([call]), moved)
