"""The whole attention step: estimate, rule, attention, combine and tail, as the server captures it.

    python -m benchmarks step --batch 1 4 --context 130000 --kept 0.2 --profile

A CUDA graph of several layers, each with keys, values and summaries of its own, so that nothing comes from the L2;
the table shows milliseconds a layer. Beside the step: the same kernel over all blocks, and SGLang's FA3 where it is
installed. By default the shapes are those of Llama-3.1-8B.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.common_arguments import (
    add_results_arguments,
    add_sparse_flags,
    make_parser,
    open_results,
    positive,
    sparse_options,
)
from benchmarks.errors import BenchmarkError
from benchmarks.machine import gpu_name, require_cuda
from benchmarks.results import text_table
from sglang_sparse.options import SparseDecodeOptions, flag
from sglang_sparse.selection_options import FORECAST

MIN_LAYERS, MAX_LAYERS = 4, 32
READ_BETWEEN = 512 * 2**20
"""Bytes that a graph reads at least, as far as `MAX_LAYERS` allow: several times any L2."""

TYPICAL_SHARE = 0.3
"""Of the KV bytes, what a step reads: only for the number of layers."""

MEMORY_SHARE = 0.85
"""Of the free device memory, what the layers may take."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("step", __doc__)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 4])
    parser.add_argument("--context", type=positive, nargs="+", default=[32_768, 130_000])
    parser.add_argument(
        "--kept",
        nargs="+",
        default=["0.2"],
        help="share of blocks that rows keep: a number, lognormal:MEAN, or a recorded profile (default: 0.2)",
    )
    parser.add_argument("--layers", type=positive, help="layers in the graph (default: as many as read 512 MB)")
    parser.add_argument("--kv-heads", type=positive, default=8)
    parser.add_argument("--group", type=positive, default=4, help="query heads a KV head")
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--page-size", type=positive, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-dense", action="store_true", help="leave out dense attention")
    parser.add_argument("--profile", action="store_true", help="also print the device time of each kernel")
    add_results_arguments(parser)
    add_sparse_flags(parser)
    return parser.parse_args(arguments)


def choose_layers(layer_bytes: int, read_bytes: int, free_bytes: int) -> int:
    """Layers of a case: enough to read `READ_BETWEEN`, as many as fit; 0 if not even one does."""
    wanted = min(max(-(-READ_BETWEEN // max(read_bytes, 1)), MIN_LAYERS), MAX_LAYERS)
    return min(wanted, int(free_bytes * MEMORY_SHARE) // layer_bytes)


def describe(options: SparseDecodeOptions) -> str:
    """The settings that matter to a step's time, for the column `case`."""
    name = options.estimator + (f" {options.thumbnail_bits}-bit" if options.estimator == "thumbnail" else "")
    target = {
        "coverage": f"gamma {options.gamma:g}",
        "top-k": f"top-k {options.top_k}",
        "top-delta": f"delta {options.resolved_delta:g}, path {options.path}",
        "all": "all",
    }[options.rule]
    return f"{name}, {target}, {options.group}, block {options.block_size}, tail {options.resolved_tail}"


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    args = parse(given)
    options = sparse_options(args)
    options.check_page_size(args.page_size)
    if options.select_by == FORECAST:
        raise BenchmarkError(
            f"{flag('select_by')} forecast: a step here has no model whose layers could be forecast; "
            f"give {flag('select_by')} query, beside a preset too"
        )
    results = open_results("step", given, args)
    require_cuda()

    import torch

    from benchmarks.kept_fractions import draw_kept
    from benchmarks.kernels.common import measure_read_rate
    from benchmarks.peers import fa3
    from benchmarks.step.case import StepCase, bytes_per_layer
    from benchmarks.step.measure import HEAD, measure
    from sglang_sparse.geometry import Geometry

    for kept in args.kept:
        draw_kept(kept, 1)
    geometry = Geometry(args.kv_heads, args.group, args.head_dim, torch.bfloat16, args.page_size, options.block_size)
    rate = measure_read_rate()
    torch.cuda.empty_cache()
    print(f"{gpu_name()}, torch {torch.__version__}, read-only rate {rate / 1e9:.0f} GB/s; {describe(options)}")
    if not args.no_dense and fa3.why_missing():
        print(f"peer fa3: {fa3.why_missing()}: left out")
    lines = []
    for batch, context in ((batch, context) for batch in args.batch for context in args.context):
        layer_bytes = bytes_per_layer(geometry, options, batch, context)
        read_bytes = int(TYPICAL_SHARE * batch * context * args.kv_heads * geometry.kv_bytes)
        layers = choose_layers(layer_bytes, read_bytes, torch.cuda.mem_get_info()[0])
        layers = min(args.layers or layers, layers)
        if layers == 0:
            print(f"B={batch} context={context}: one layer takes {layer_bytes / 1e9:.0f} GB: left out")
            continue
        for kept in args.kept:
            targets = draw_kept(kept, layers * batch * args.kv_heads, args.seed).view(layers, batch, args.kv_heads)
            rows, shown = measure(
                StepCase(options, geometry, batch=batch, context=context, kept=targets, device="cuda", seed=args.seed),
                kept=kept,
                name=f"{describe(options)}, kept {kept}",
                rate=rate,
                dense=not args.no_dense and kept == args.kept[0],
                with_profile=args.profile,
            )
            results.append(rows)
            lines += shown
            print("\n".join("  ".join(line) for line in shown), flush=True)
            torch.cuda.empty_cache()
    print("\n" + text_table(HEAD, lines, left=2))
    return 0


if __name__ == "__main__":
    from benchmarks.__main__ import main as driver

    sys.exit(driver(["step", *sys.argv[1:]]))
