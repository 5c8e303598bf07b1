"""Measures the operations of `sparse_kernels` on a CUDA device and prints a table of each."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

import torch

from .common import Measurement, Suite, measure_read_rate, table, write_csv

OPERATIONS = (
    "sparse_attention",
    "combine",
    "tail_attention",
    "block_mass_thumbnail",
    "block_mass_statistics",
    "block_mass_exact",
    "coverage_rule",
    "top_k_rule",
    "thumbnail",
    "block_statistics",
    "page_table",
    "step_totals",
)
ON_REQUEST = ("sparse_attention_tiles",)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument(
        "operations",
        nargs="*",
        metavar="operation",
        help=f"default: {', '.join(OPERATIONS)}; only when named: {', '.join(ON_REQUEST)}",
    )
    parser.add_argument("--batch", type=int, nargs="+", default=list(Suite.batches))
    parser.add_argument("--context", type=int, nargs="+", default=list(Suite.contexts))
    parser.add_argument("--csv", type=Path, help="also write the measurements to this file")
    options = parser.parse_args(arguments)
    unknown = set(options.operations) - {*OPERATIONS, *ON_REQUEST}
    if unknown:
        parser.error(f"unknown operation {', '.join(sorted(unknown))}; known: {', '.join((*OPERATIONS, *ON_REQUEST))}")
    if not torch.cuda.is_available():
        print("benchmarks.kernels: no CUDA device, nothing was measured", file=sys.stderr)
        return 2
    device_name = torch.cuda.get_device_name()
    read_rate = measure_read_rate()
    print(f"{device_name}, torch {torch.__version__}, read-only rate {read_rate / 1e9:.0f} GB/s")
    suite = Suite(batches=tuple(options.batch), contexts=tuple(options.context))
    measurements: list[Measurement] = []
    for operation in options.operations or OPERATIONS:
        module = importlib.import_module(f".bench_{operation}", __package__)
        started = time.perf_counter()
        results = list(module.run(suite))
        print(f"\n{module.__doc__.splitlines()[0]} ({time.perf_counter() - started:.0f} s)")
        print(table(results, read_rate), flush=True)
        measurements += results
    if options.csv is not None:
        write_csv(options.csv, measurements, read_rate, device_name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
