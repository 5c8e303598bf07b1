"""Draws time per output token against context, dense and sparse, from rows of a results file.

    python -m benchmarks plot --run 20261130-150648-b744 --out docs/images/tpot.png

A panel for each batch size. Of rows that say the same thing, the latest run's is drawn; only rows of one run can be
compared exactly.
"""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.common_arguments import make_parser
from benchmarks.errors import BenchmarkError
from benchmarks.results import DEFAULT_PATH, read_results
from sglang_sparse.files import check_target, write_bytes

Lines = dict[int, dict[str, dict[int, float]]]
"""Milliseconds by batch, implementation and context."""


def collect(rows: list[dict[str, str]], bench: str, case: str) -> Lines:
    """What to draw of `rows`: those of `bench` whose case contains `case`. Raises BenchmarkError if there are none."""
    cases = {row["case"] for row in rows if row["bench"] == bench and case in row["case"]}
    if not cases:
        raise BenchmarkError(f"--csv: there are no rows of {bench} with {case!r} in their case: nothing to draw")
    if len(cases) > 1:
        raise BenchmarkError(f"--case {case!r} fits {len(cases)} cases: name one of {'; '.join(sorted(cases))}")
    lines: Lines = defaultdict(lambda: defaultdict(dict))
    # Later rows of the file are later runs.
    for row in rows:
        if row["bench"] == bench and row["case"] in cases:
            lines[int(row["batch"])][row["impl"]][int(row["context"])] = float(row["ms"])
    return {batch: dict(by_impl) for batch, by_impl in lines.items()}


def draw(lines: Lines, title: str) -> bytes:
    """A PNG of `lines`."""
    try:
        import matplotlib
    except ImportError:
        raise BenchmarkError("matplotlib is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(lines), figsize=(1 + 3.2 * len(lines), 3.4), squeeze=False)
    for place, (batch, by_impl) in zip(axes[0], sorted(lines.items()), strict=True):
        for impl, points in sorted(by_impl.items()):
            contexts = sorted(points)
            place.plot([c / 1000 for c in contexts], [points[c] for c in contexts], marker="o", label=impl)
        place.set_title(f"batch {batch}")
        place.set_xlabel("context, 1,000 tokens")
        place.set_ylim(bottom=0)
        place.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms per output token")
    axes[0][0].legend()
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    content: Any = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    pyplot.close(figure)
    return content.getvalue()


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("plot", __doc__)
    parser.add_argument("--csv", type=Path, default=DEFAULT_PATH, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--case", default="", help="part of the column case, where several were measured")
    parser.add_argument("--run", help="only rows whose column run is this")
    args = parser.parse_args(arguments)
    check_target("--out", args.out, (".png",))
    rows = [row for row in read_results(args.csv, "--csv") if args.run in (None, row["run"])]
    if not rows:
        raise BenchmarkError(f"--run {args.run}: {args.csv} has no rows of this run: see its column run")
    lines = collect(rows, "tpot", args.case)
    used = [row for row in rows if row["bench"] == "tpot" and args.case in row["case"]]
    write_bytes(args.out, draw(lines, f"{used[0]['case']}, {', '.join(sorted({row['gpu'] for row in used}))}"))
    print(f"{args.out}: {len(used)} rows")
    return 0


if __name__ == "__main__":
    from benchmarks.__main__ import main as driver

    sys.exit(driver(["plot", *sys.argv[1:]]))
