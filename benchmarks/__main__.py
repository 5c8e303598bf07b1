"""Benchmarks. Each appends what it measured to benchmarks/results.csv; docs/benchmarks.md explains the columns."""

from __future__ import annotations

import importlib
import sys

from sglang_sparse.files import FileError
from sglang_sparse.options import OptionsError

from .errors import BenchmarkError, ServerError

BENCHMARKS = {
    "kernel": ("benchmarks.kernels.__main__", "each operation of sparse_kernels, and peers for attention"),
    "step": ("benchmarks.step.__main__", "the whole attention step of several layers, with a profile by kernel"),
    "workload": (
        "benchmarks.workload.__main__",
        "writes a model of Llama-3.1-8B's shape whose attention is peaked",
    ),
    "tpot": ("benchmarks.server.tpot", "time per output token of real servers, dense and sparse in turn"),
    "load": ("benchmarks.server.load", "throughput of real servers under a closed loop at rising concurrency"),
    "chat": ("benchmarks.server.chat", "facts planted in a long document, asked of a real server"),
    "offload-trace": ("benchmarks.offload_trace", "hit rates of a cache of blocks, from the sets of real decodes"),
    "host-fidelity": ("benchmarks.host_fidelity", "KL of rounding keys and values in host memory, by real decodes"),
    "plot": ("benchmarks.plot", "a picture of rows of benchmarks/results.csv"),
}


def usage() -> str:
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in BENCHMARKS.items()]
    return "\n".join(["usage: python -m benchmarks NAME [options]", "", *lines, "", "Options: NAME --help"])


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark that the first argument names. 2: bad input, or something it needs is missing."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(f"{__doc__.strip()}\n\n{usage()}")
        return 0
    name = {"kernels": "kernel"}.get(given[0], given[0])
    if name not in BENCHMARKS:
        print(f"benchmarks: unknown name {given[0]!r}: use one of {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(BENCHMARKS[name][0]).main(given[1:])
    except (BenchmarkError, FileError, OptionsError) as error:
        print(f"benchmarks {name}: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"benchmarks {name}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("benchmarks", "sglang_sparse", "sparse_kernels"):
            raise
        missing = f"{error.name} is not installed" if error.name else " ".join(str(error).split())
        print(f"benchmarks {name}: {missing}: nothing was measured", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
