"""Blocks read by each request, once a step for all layers. Bytes: counts, lengths, totals; the launch matters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels.request_totals import FIELDS, request_totals, request_totals_reference

from .common import Measurement, Suite, time_in_turn

LAYERS = 32


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size; the context only sets the lengths."""
    for size, context in suite.cases():
        lengths = torch.full((size,), context, dtype=torch.int32, device=suite.device)
        shape = (LAYERS, size, suite.num_kv_heads)
        counts = torch.randint(1, context // suite.block_size, shape, dtype=torch.int32, device=suite.device)
        out = torch.zeros((size, len(FIELDS)), dtype=torch.int64, device=suite.device)
        settings = {"layers": LAYERS, "dense_layers": 0, "block_size": suite.block_size}
        call = partial(request_totals, counts, lengths, out=out, **settings)
        call()
        expected = torch.zeros_like(out)
        request_totals_reference(counts, lengths, out=expected, **settings)
        if not torch.equal(out, expected):
            raise RuntimeError(f"request_totals B={size} context={context} differs from the reference")
        moved = counts.nbytes + lengths.nbytes + out.nbytes
        yield Measurement("request_totals", "", size, context, None, time_in_turn([call]), moved)
