"""Arguments that several benchmarks share."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from sglang_sparse.option_sources import add_flags, merge
from sglang_sparse.options import SparseDecodeOptions

from .results import DEFAULT_PATH, Results


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser of `python -m benchmarks NAME` whose help shows the whole of `description`."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_results_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", type=Path, default=DEFAULT_PATH, help="CSV file that rows are appended to (default: %(default)s)"
    )
    parser.add_argument("--no-results", action="store_true", help="print only")


def open_results(name: str, arguments: list[str], options: argparse.Namespace) -> Results:
    """The file that `options` name; raises FileError before anything is measured."""
    command = shlex.join(["python", "-m", "benchmarks", name, *arguments])
    return Results(None if options.no_results else options.results, command)


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number above 0")
    return value


def not_negative(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: give 0 or a whole number above")
    return value


def add_sparse_flags(parser: argparse.ArgumentParser) -> None:
    """The server's flags `--sparse-decode-...`."""
    add_flags(parser)


def sparse_options(options: argparse.Namespace) -> SparseDecodeOptions:
    """What the server's flags ask for. Raises OptionsError."""
    given = {name: value for name, value in vars(options).items() if name.startswith("sparse_decode_")}
    return merge({name.removeprefix("sparse_decode_"): value for name, value in given.items()})
