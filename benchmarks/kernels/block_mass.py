"""What the benchmarks of the block-mass operations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from .common import Batch, Measurement, Suite, check_close, time_in_turn

Operation = Callable[[Batch, torch.Tensor], None]


def measure_block_mass(
    suite: Suite,
    name: str,
    case: str,
    operation: Operation,
    reference: Operation,
    page_bytes: int,
    tolerance: float,
) -> Iterator[Measurement]:
    """Measures `operation(batch, out)` for every batch size and context.

    Args:
        page_bytes: what the operation reads of a page for one KV head.
        tolerance: allowed relative error against `reference` (Euclidean norm).
    """
    for size, context in suite.cases():
        pages = size * (context // suite.page_size)
        read = pages * suite.num_kv_heads * page_bytes
        sets = suite.input_sets(size, context, read)
        shape = (size, suite.num_kv_heads, suite.group_size, suite.capacity(context))
        outs = [torch.zeros(shape, device=suite.device) for _ in sets]
        calls = [partial(operation, batch, out) for batch, out in zip(sets, outs, strict=True)]
        calls[0]()
        for b in {0, size - 1}:
            expected = torch.zeros_like(outs[0][b : b + 1])
            reference(sets[0].request(b), expected)
            check_close(f"{name} {case} B={size} context={context} request {b}", outs[0][b], expected[0], tolerance)
        moved = read + outs[0][..., : suite.blocks(context)].nbytes
        yield Measurement(name, case, size, context, None, time_in_turn(calls), moved)


def mass_arguments(suite: Suite) -> dict[str, float | int]:
    """Keyword arguments that all block-mass operations take."""
    return {"scale": suite.scale, "page_size": suite.page_size, "block_size": suite.block_size, "min_context": 0}
