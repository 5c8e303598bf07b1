"""Results as JSON, CSV rows, a printed table and a picture. Files are written whole or not at all."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_sparse.calibrate.errors import CalibrationError
from sglang_sparse.calibrate.measure import Result
from sglang_sparse.calibrate.settings import Setting
from sglang_sparse.files import write_bytes
from sglang_sparse.options import SparseDecodeOptions

COLUMNS = (
    "model",
    "context",
    "prompts",
    "estimator",
    "rule",
    "value",
    "kl_mean",
    "kl_p99",
    "agreement",
    "kept",
    "bytes_read",
    "coverage_p1",
    "is_default",
)
"""Of benchmarks/fidelity.csv."""


def read_csv(path: Path) -> str:
    """What a CSV file to append to holds, or nothing; raises CalibrationError if it is no such file."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"--csv {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    header = ",".join(COLUMNS)
    if before and before.splitlines()[0] != header:
        raise CalibrationError(f"--csv {path} has other columns than {header}: give another file")
    return before


def is_default(result: Result) -> bool:
    """Whether a result is of the server's default setting."""
    return result.setting == Setting(SparseDecodeOptions())


def entry(result: Result, part: str = "measured") -> dict[str, Any]:
    """A result as a JSON object, with its options and its figures by prompt, layer and head.

    `part` says what it is of: `measured`, or in a calibration `tried`, `chosen` or `held out`.
    """
    options = dataclasses.asdict(result.setting.options)
    by_head = ("kept_by_head", "coverage_by_head", "coverage_p1_by_head")
    detailed = ("positions", "kl_by_prompt", *by_head, "bytes_by_layer")
    return {"part": part, **result.row(), "options": options, **{name: getattr(result, name) for name in detailed}}


def write_json(path: Path, about: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
    """Everything measured: `about` and each `entry`."""
    write_bytes(path, (json.dumps({**about, "results": entries}, indent=1) + "\n").encode())


def append_csv(path: Path, about: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Adds a row for each result; the file, if there is one, must have the same columns."""
    before = read_csv(path)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if not before:
        writer.writeheader()
    for result in results:
        row = result.row()
        figures = {name: f"{row[name]:.6g}" for name in COLUMNS[6:12]}
        writer.writerow(
            {
                "model": about["model"],
                "context": about["context"],
                "prompts": result.prompts,
                **{name: row[name] for name in ("estimator", "rule", "value")},
                **figures,
                "is_default": int(is_default(result)),
            }
        )
    if before and not before.endswith("\n"):
        before += "\n"
    write_bytes(path, (before + text.getvalue()).encode())


def table(results: Sequence[Result]) -> str:
    """A table for the terminal, a line each."""
    lines = [
        f"{'estimator':44} {'rule':18} {'value':>6} {'KL mean':>9} {'KL p99':>8} {'KL max':>8} {'top-1':>6} "
        f"{'cover':>6} {'p1':>6} {'kept':>6} {'bytes':>6}"
    ]
    lines += [
        f"{r.setting.estimator:44} {r.setting.rule:18} {r.setting.value:6.3f} {r.kl_mean:9.6f} {r.kl_p99:8.5f} "
        f"{r.kl_max:8.5f} {r.agreement:6.3f} {r.coverage_mean:6.3f} {r.coverage_p1:6.3f} {r.kept:6.3f} "
        f"{r.bytes_read:6.3f}"
        for r in results
    ]
    return "\n".join(lines)


NAMED_LINES = 20
"""Where a picture has more lines, those of one setting are not named."""


def plotting() -> Any:
    """matplotlib's pyplot for files; raises CalibrationError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise CalibrationError("--plot needs matplotlib: pip install 'sglang-sparse[eval]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(path: Path, about: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], shown: Mapping[str, Any]) -> None:
    """A PNG: bytes read against KL, a line for each estimator, and `shown`'s kept blocks by layer and KV head.

    `about` and `entries` are what `write_json` writes, so a picture can be drawn anew from a report.
    """
    pyplot = plotting()
    figure, (curve, heat) = pyplot.subplots(1, 2, figsize=(13, 7), width_ratios=(3, 2))
    curve.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
    lines: dict[str, list[tuple[float, float]]] = {}
    for made in entries:
        name = f"{made['estimator']} {made['rule']}".removesuffix(" coverage")
        # A KL of 0 has no place on a logarithmic axis.
        lines.setdefault(name, []).append((made["bytes_read"], max(made["kl_mean"], 1e-7)))
    single = [points[0] for points in lines.values() if len(points) == 1] if len(lines) > NAMED_LINES else []
    for name, points in lines.items():
        if len(points) > 1 or not single:
            curve.plot(*zip(*sorted(points), strict=True), marker="o", ms=3, label=name)
    if single:
        curve.plot(*zip(*single, strict=True), ".", ms=4, color="0.6", zorder=0, label="others, one setting each")
    curve.set(yscale="log", xlabel="bytes read ÷ all KV bytes", ylabel="mean KL to dense, nats")
    curve.set_title(f"{about['model']}, {about['context']} tokens, {about['prompts']} prompts")
    curve.grid(alpha=0.3)
    curve.legend(fontsize=6, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    image = heat.imshow(shown["kept_by_head"], aspect="auto", vmin=0, cmap="viridis")
    heat.set(xlabel="KV head", ylabel="layer", xticks=range(len(shown["kept_by_head"][0])))
    heat.set_title(f"blocks kept: {shown['estimator']} {shown['value']:g}", fontsize=9)
    figure.colorbar(image, ax=heat)
    figure.tight_layout()
    image_file = io.BytesIO()
    figure.savefig(image_file, format="png", dpi=130)
    pyplot.close(figure)
    write_bytes(path, image_file.getvalue())
