"""Launch options of the fused pass: warps, pages scanned together, programs a multiprocessor, tiles and stages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sparse_kernels.fused_top_delta import FusedConfig

from .bench_fused_top_delta import Summaries, cases, make_workspace, moved_bytes
from .common import Measurement, Suite, time_in_turn

CONFIGS = (
    FusedConfig(pages=4, tile=32, num_warps=4, num_stages=3, programs_per_sm=4, registers=128),
    FusedConfig(pages=4, tile=64, num_warps=4, num_stages=2, programs_per_sm=3, registers=168),
    FusedConfig(pages=4, tile=64, num_warps=4, num_stages=3, programs_per_sm=2, registers=None),
    FusedConfig(pages=8, tile=64, num_warps=8, num_stages=3, programs_per_sm=2, registers=128),
    FusedConfig(pages=8, tile=64, num_warps=4, num_stages=2, programs_per_sm=3, registers=168),
    FusedConfig(pages=2, tile=32, num_warps=2, num_stages=3, programs_per_sm=8, registers=128),
    FusedConfig(pages=2, tile=32, num_warps=2, num_stages=3, programs_per_sm=6, registers=168),
    FusedConfig(pages=1, tile=16, num_warps=1, num_stages=3, programs_per_sm=12, registers=168),
    FusedConfig(pages=1, tile=32, num_warps=1, num_stages=2, programs_per_sm=8, registers=None),
)


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every configuration, batch size, context and share of kept blocks with 4 bits and a tail."""
    summaries = Summaries.make(suite, 4)
    for size, context in suite.cases():
        for kept in suite.kept:
            made = cases(suite, summaries, size, context, kept)
            for config in CONFIGS:
                name = (
                    f"{config.num_warps} warps, {config.pages} pages, tile {config.tile}, {config.num_stages} stages, "
                    f"{config.programs_per_sm} a SM, kept {kept}"
                )
                workspace = make_workspace(suite, config)
                made[0].check(name, workspace, True, config)
                seconds = time_in_turn([partial(case.fused, workspace, True, config) for case in made])
                moved = moved_bytes(made, True)
                yield Measurement("fused_top_delta", name, size, context, float(kept), seconds, moved)
