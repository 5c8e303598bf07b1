"""Sparse attention with other tiles, warps, stages and grids than the default: the figures behind `tile_config`.

Runs only when named. The case column reads tile x warps x stages x programs for each multiprocessor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sparse_kernels import AttentionWorkspace
from sparse_kernels import _attention_plan as plan

from .bench_sparse_attention import attention_call, bytes_to_move, check_output, make_lists
from .common import Measurement, Suite, time_in_turn

CONFIGS = (
    (64, 4, 4, 2),
    (64, 4, 3, 2),
    (64, 4, 3, 3),
    (64, 4, 2, 3),
    (64, 8, 4, 2),
    (128, 4, 2, 2),
    (128, 8, 2, 2),
    (128, 8, 3, 1),
    (64, 4, 6, 1),
)
BATCHES = (1, 4)
KEPT = (0.3, 1.0)


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures each configuration for the first of the suite's batch sizes up to 4, at its longest context."""
    default = plan.tile_config
    sms = torch.cuda.get_device_properties(suite.device).multi_processor_count
    context = max(suite.contexts)
    try:
        for size in [b for b in suite.batches if b in BATCHES] or list(suite.batches[:1]):
            for kept in KEPT:
                dense_bytes = 2 * size * context * suite.num_kv_heads * suite.head_bytes
                sets = suite.input_sets(size, context, int(dense_bytes * kept))
                lists = make_lists(suite, sets, kept)
                moved = sum(bytes_to_move(suite, *each) for each in zip(sets, lists, strict=True)) // len(sets)
                share = moved / bytes_to_move(suite, sets[0], (None, None))
                outs = [torch.empty_like(batch.q) for batch in sets]
                for tile, warps, stages, per_sm in CONFIGS:
                    config = plan.TileConfig(tile, warps, stages)
                    plan.tile_config = lambda head_dim, dtype, config=config: config
                    workspace = AttentionWorkspace.create(per_sm * sms, suite.group_size, suite.head_dim, suite.device)
                    calls = [
                        attention_call(suite, *each, workspace, out)
                        for *each, out in zip(sets, lists, outs, strict=True)
                    ]
                    name = f"{tile}x{warps}x{stages}x{per_sm}"
                    calls[0]()
                    check_output(suite, sets[0], lists[0], outs[0], name)
                    yield Measurement("sparse_attention", name, size, context, share, time_in_turn(calls), moved)
    finally:
        plan.tile_config = default
