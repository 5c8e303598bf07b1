"""Largest score over the forced blocks of each row, from split keys. Bytes: codes, bounds and residuals of those."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import split_maximum, split_maximum_reference

from .bench_pseudo_maximum import SINK_TOKENS, WINDOW_TOKENS
from .common import Measurement, Suite, check_close, time_in_turn
from .split import split_pages, with_open_pages


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
    pages = split_pages(suite)
    for size, context in suite.cases():
        tokens = SINK_TOKENS + WINDOW_TOKENS
        # A page's bounds are read for each of its tiles, and come from the cache after the first.
        bounds = -(-tokens // suite.page_size) * 4
        read = int(size * suite.num_kv_heads * suite.head_dim * (tokens * 1.25 + bounds))
        sets = suite.input_sets(size, context, read)
        outs = [torch.empty(size, suite.num_kv_heads, suite.group_size, device=suite.device) for _ in sets]
        inputs = [(batch.q, with_open_pages(suite, batch, pages), batch.page_table, batch.seq_lens) for batch in sets]
        calls = [partial(split_maximum, *each, **arguments, out=out) for each, out in zip(inputs, outs, strict=True)]
        calls[0]()
        expected = torch.empty_like(outs[0])
        split_maximum_reference(*inputs[0], **arguments, out=expected)
        check_close(f"split_maximum B={size} context={context}", outs[0], expected, 1e-2)
        yield Measurement("split_maximum", "sinks, window, open page", size, context, None, time_in_turn(calls), read)
