"""The screen of `top`, made with rich."""

from __future__ import annotations

from typing import Any

from rich.bar import Bar
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_sparse.top.offload import offload_line

BAR_WIDTH = 24
LAYERS_A_COLUMN = 16
LOW_COVERAGE = 0.02
"""Below gamma by more than this, a layer's coverage is shown in red; the server warns at the same margin."""


def share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def screen(url: str, summary: dict[str, Any]) -> RenderableType:
    """The whole screen. Shares are of the last interval if anything was decoded in it, else since the start."""
    interval, start = summary["interval"] or {}, summary["since_start"]
    is_live = bool(interval.get("steps"))
    shown = interval if is_live else start
    return Group(
        Text(f"{summary['model']}  {url}", style="bold"),
        _facts(summary, interval, shown),
        Text("last interval" if is_live else "nothing decoded: since the start", style="dim"),
        _layers(summary, shown),
    )


def _facts(summary: dict[str, Any], interval: dict[str, Any], shown: dict[str, Any]) -> Table:
    coverage, options = summary["coverage"], summary["options"]
    speed = interval.get("tokens_per_second")
    running = summary["running_requests"]
    facts = [
        ("throughput", "-" if speed is None else f"{speed:.1f} tokens/s"),
        ("running, queued", "-" if running is None else f"{running}, {summary['queued_requests']}"),
        ("blocks kept", share(shown["kept_fraction"])),
        ("KV bytes read", share(shown["bytes_read_fraction"])),
        ("steps", f"{summary['since_start']['steps']:,} since the start"),
        ("coverage", _coverage(coverage)),
        ("asked for", _asked(options) if summary["is_on"] else "nothing: sparse decode is switched off"),
        ("page summaries", f"{summary['summary_bytes'] / 1e9:.2f} GB"),
    ]
    if shown["offload"]:
        facts.append(("offload", offload_line(shown["offload"], shown.get("seconds"))))
    if shown["time_shares"]:
        facts.append(
            ("layer time", ", ".join(f"{name} {share(part, 0)}" for name, part in shown["time_shares"].items()))
        )
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(name, style="dim"), value)
    return table


def _coverage(coverage: dict[str, Any] | None) -> str:
    if coverage is None:
        return "not audited"
    if coverage["mean"] is None:
        return "no audited step yet"
    return f"{coverage['mean']:.3f} in {coverage['samples']:,} audited steps, worst in layer {coverage['worst_layer']}"


def _asked(options: dict[str, Any]) -> str:
    if options["rule"] == "coverage":
        differs = "by head" if options["gamma_by_head"] else "by layer" if options["gamma_by_layer"] else ""
        return f"gamma {differs or options['gamma']}"
    if options["rule"] == "top-delta":
        return f"top-delta {options['delta']:g}"
    return f"{options['rule']} {options['top_k'] or ''}".strip()


def _layers(summary: dict[str, Any], shown: dict[str, Any]) -> RenderableType:
    """Kept blocks of each layer as bars, with the audited coverage beside them."""
    kept = shown["kept_fraction_by_layer"]
    coverage = (summary["coverage"] or {}).get("by_layer", {})
    tables = []
    for start in range(0, len(kept), LAYERS_A_COLUMN):
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for title, justify in (("layer", "right"), ("kept", "left"), ("", "right"), ("coverage", "right")):
            table.add_column(title, justify=justify)  # type: ignore[arg-type]
        for layer, part in enumerate(kept[start : start + LAYERS_A_COLUMN], start):
            bar = Bar(1.0, 0.0, min(part, 1.0), width=BAR_WIDTH, color="cyan", bgcolor="grey23")
            reached = coverage.get(str(layer))
            table.add_row(str(layer), bar, share(part), _reached(reached, summary["options"], layer))
        tables.append(table)
    return Columns(tables)


def _reached(coverage: float | None, options: dict[str, Any], layer: int) -> Text:
    if coverage is None:
        return Text("-", style="dim")
    is_low = options["rule"] == "coverage" and coverage < _gamma(options, layer) - LOW_COVERAGE
    return Text(f"{coverage:.3f}", style="red" if is_low else "")


def _gamma(options: dict[str, Any], layer: int) -> float:
    if options["gamma_by_head"]:
        heads = options["gamma_by_head"][layer]
        return sum(heads) / len(heads)
    return options["gamma_by_layer"][layer] if options["gamma_by_layer"] else options["gamma"]
