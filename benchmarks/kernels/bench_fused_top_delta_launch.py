"""Launch options of the fused pass: warps, programs a multiprocessor, tiles and stages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sparse_kernels.fused_top_delta import FusedConfig

from .bench_fused_top_delta import Summaries, cases, make_workspace, moved_bytes
from .common import Measurement, Suite, time_in_turn

CONFIGS = tuple(
    FusedConfig(tile=tile, num_warps=warps, num_stages=stages, programs_per_sm=programs, registers=registers)
    for tile, warps, stages, programs, registers in (
        (16, 1, 5, 10, 200),
        (16, 1, 5, 8, None),
        (16, 1, 5, 12, 168),
        (16, 1, 7, 8, None),
        (16, 1, 3, 12, 168),
        (32, 1, 5, 6, None),
        (16, 1, 5, 6, None),
        (64, 2, 5, 3, None),
        (64, 4, 3, 3, 168),
    )
)


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every configuration, batch size, context and share of kept blocks with 4 bits and a tail."""
    summaries = Summaries.make(suite, 4)
    for size, context in suite.cases():
        for kept in suite.kept:
            made = cases(suite, summaries, size, context, kept)
            for config in CONFIGS:
                name = (
                    f"{config.num_warps} warps, tile {config.tile}, {config.num_stages} stages, "
                    f"{config.programs_per_sm} a SM, {config.registers} registers, kept {kept}"
                )
                workspace = make_workspace(suite, config)
                made[0].check(name, workspace, True, config)
                seconds = time_in_turn([partial(case.fused, workspace, True, config) for case in made])
                moved = moved_bytes(made, True)
                yield Measurement("fused_top_delta", name, size, context, float(kept), seconds, moved)
