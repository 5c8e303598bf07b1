"""The operations of `sparse_kernels`, one by one, and other implementations of attention beside ours.

    python -m benchmarks kernel sparse_attention --batch 1 4 --context 130000 --kept 0.1 0.3 1 qwen-30k lognormal:0.2

Prints a table of each: time, bytes that any implementation must move, and their share of the read rate that is measured
at the start. Shapes are those of Llama-3.1-8B.
"""

from __future__ import annotations

import importlib
import sys
import time

from benchmarks.common_arguments import add_results_arguments, make_parser, open_results, positive
from benchmarks.machine import gpu_name, require_cuda

OPERATIONS = (
    "sparse_attention",
    "fused_top_delta",
    "combine",
    "block_mass_thumbnail",
    "block_mass_statistics",
    "block_mass_exact",
    "block_score_strided",
    "coverage_rule",
    "top_k_rule",
    "top_delta_rule",
    "pseudo_maximum",
    "thumbnail",
    "block_statistics",
    "page_summary",
    "page_table",
    "open_places",
    "step_totals",
    "request_totals",
    "stopwatch",
)
ON_REQUEST = (
    "sparse_attention_tiles",
    "fused_top_delta_launch",
    "coverage_rule_clusters",
    "slot_lookup",
    "slot_assign",
    "slot_claim",
    "slot_attention",
    "block_gather",
    "block_unpack",
    "block_store",
    "expected_blocks",
    "prefetch_budget",
    "prefetch_totals",
    "rotated_heads",
    "gather_overlap",
    "split_attention",
    "split_quantise",
    "split_dequantise",
    "split_maximum",
    "split_store",
    "offload_step",
)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = make_parser("kernel", __doc__)
    parser.add_argument(
        "operations",
        nargs="*",
        metavar="operation",
        help=f"default: {', '.join(OPERATIONS)}; only when named: {', '.join(ON_REQUEST)}",
    )
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 4, 8, 64])
    parser.add_argument("--context", type=positive, nargs="+", default=[32_768, 130_000])
    parser.add_argument(
        "--room",
        type=positive,
        default=0,
        metavar="TOKENS",
        help="tokens that each row has room for, as in a server of longer contexts, if more than its context",
    )
    parser.add_argument(
        "--kept",
        nargs="+",
        default=["0.1", "0.3", "1"],
        help="shares of blocks that attention and tail work on: numbers, lognormal:MEAN, or recorded profiles",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        help="fa3, triton, sdpa (dense), flashinfer-paged, flashinfer-variable (lists), or none; default: all that run",
    )
    add_results_arguments(parser)
    options = parser.parse_args(given)
    unknown = set(options.operations) - {*OPERATIONS, *ON_REQUEST}
    if unknown:
        parser.error(f"unknown operation {', '.join(sorted(unknown))}; known: {', '.join((*OPERATIONS, *ON_REQUEST))}")
    operations = options.operations or OPERATIONS
    results = open_results("kernel", given, options)
    require_cuda()

    import torch

    from benchmarks import peers
    from benchmarks.kept_fractions import draw_kept

    from .common import Suite, measure_read_rate, result_rows, table

    for kept in options.kept:
        draw_kept(kept, 1)
    chosen: list[str] = []
    if {"sparse_attention", "fused_top_delta"} & set(operations):
        chosen = peers.available([] if options.peers == ["none"] else options.peers)
    read_rate = measure_read_rate()
    print(f"{gpu_name()}, torch {torch.__version__}, read-only rate {read_rate / 1e9:.0f} GB/s")
    suite = Suite(
        batches=tuple(options.batch),
        contexts=tuple(options.context),
        kept=tuple(options.kept),
        peers=tuple(chosen),
        room=options.room,
    )
    for operation in operations:
        module = importlib.import_module(f".bench_{operation}", __package__)
        started = time.perf_counter()
        measurements = []
        for measurement in module.run(suite):
            results.append(result_rows([measurement], read_rate))
            measurements.append(measurement)
        print(f"\n{module.__doc__.splitlines()[0]} ({time.perf_counter() - started:.0f} s)")
        print(table(measurements, read_rate), flush=True)
    return 0


if __name__ == "__main__":
    from benchmarks.__main__ import main as driver

    sys.exit(driver(["kernel", *sys.argv[1:]]))
