"""Largest exact score over the forced blocks of each row. Bytes: the keys of those blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import pseudo_maximum, pseudo_maximum_reference

from .common import Measurement, Suite, check_close, time_in_turn

SINK_TOKENS, WINDOW_TOKENS = 16, 128


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size and context."""
    arguments = {
        "scale": suite.scale,
        "page_size": suite.page_size,
        "block_size": suite.block_size,
        "sink_tokens": SINK_TOKENS,
        "window_tokens": WINDOW_TOKENS,
        "min_context": 0,
    }
    for size, context in suite.cases():
        read = size * suite.num_kv_heads * (SINK_TOKENS + WINDOW_TOKENS) * suite.head_bytes
        sets = suite.input_sets(size, context, read)
        outs = [torch.empty(size, suite.num_kv_heads, suite.group_size, device=suite.device) for _ in sets]
        calls = [
            partial(pseudo_maximum, batch.q, suite.k_pool, batch.page_table, batch.seq_lens, **arguments, out=out)
            for batch, out in zip(sets, outs, strict=True)
        ]
        calls[0]()
        first, expected = sets[0], torch.empty_like(outs[0])
        inputs = (first.q, suite.k_pool, first.page_table, first.seq_lens)
        pseudo_maximum_reference(*inputs, **arguments, out=expected)
        check_close(f"pseudo_maximum B={size} context={context}", outs[0], expected, 1e-2)
        yield Measurement("pseudo_maximum", "sinks, window, open page", size, context, None, time_in_turn(calls), read)
