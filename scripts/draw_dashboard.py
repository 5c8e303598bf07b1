"""Draws the Grafana dashboard from a running Prometheus, where Grafana is not at hand.

    draw_dashboard.py --prometheus http://127.0.0.1:9090 --minutes 10 OUT.png

Panels, their places, queries and units are those of docker/grafana/dashboards/sglang_sparse.json; the drawing is
matplotlib's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

BOARD = Path(__file__).resolve().parent.parent / "docker" / "grafana" / "dashboards" / "sglang_sparse.json"
COLUMNS, CELL = 24, (0.62, 0.36)
DARK, PANEL, TEXT, DIM = "#111217", "#181b1f", "#d8d9da", "#8e8e8e"
COLOURS = ("#73bf69", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#fade2a")
POINTS = 240

Line = tuple[str, list[float], list[float]]
"""Legend, times and values."""


class DrawError(Exception):
    """Nothing can be drawn; one line says why."""


def ask(url: str, path: str, **query: Any) -> list[dict[str, Any]]:
    """The result of a Prometheus query."""
    address = f"{url.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(address, timeout=30) as response:
            return json.load(response)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise DrawError(f"Prometheus refuses {query['query']!r}: {error.read().decode(errors='replace')}") from None
    except (OSError, ValueError, KeyError) as error:
        raise DrawError(f"no Prometheus answers at {url} ({error}): give its --prometheus") from None


def plain(expression: str) -> str:
    """A query with Grafana's variables at the values that the board opens with."""
    return expression.replace("$instance", ".*").replace("$model", ".*").replace("$__rate_interval", "30s")


def legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)


def in_unit(value: float, unit: str) -> str:
    if math.isnan(value):
        return "no data"
    if unit == "percentunit":
        return f"{100 * value:.1f}%"
    if unit == "bytes":
        return next(
            f"{value / size:.3g} {name}"
            for size, name in ((1e9, "GB"), (1e6, "MB"), (1, "B"))
            if value >= size or size == 1
        )
    if unit == "s":
        return f"{value:.2g} s" if value >= 1 else f"{1000 * value:.3g} ms"
    return f"{value:.3g}"


def series(panel: dict[str, Any], url: str, start: float, end: float) -> list[Line]:
    """Name, times and values of each line of a panel; a bar gauge's have one value."""
    found = []
    for target in panel["targets"]:
        query = plain(target["expr"])
        if target.get("instant"):
            results = ask(url, "query", query=query, time=end)
        else:
            results = ask(url, "query_range", query=query, start=start, end=end, step=(end - start) / POINTS)
        for result in results:
            pairs = result.get("values") or [result["value"]]
            times, values = [float(at) for at, _ in pairs], [float(value) for _, value in pairs]
            found.append((legend(target["legendFormat"], result["metric"]), times, values))
    return found


def last(values: list[float]) -> float:
    """The last value that is a number."""
    return next((value for value in reversed(values) if not math.isnan(value)), float("nan"))


def draw_stat(axes: Any, panel: dict[str, Any], lines: list[Line]) -> None:
    axes.axis("off")
    defaults = panel["fieldConfig"]["defaults"]
    value = last(lines[0][2]) if lines else float("nan")
    colour = DIM if math.isnan(value) else threshold_colour(panel, value)
    axes.text(0.5, 0.45, in_unit(value, defaults["unit"]), color=colour, size=19, ha="center", va="center")


def threshold_colour(panel: dict[str, Any], value: float) -> str:
    """The colour of the last threshold that a value reaches."""
    named = {"red": COLOURS[3], "orange": COLOURS[2], "green": COLOURS[0]}
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
    reached = [named[step["color"]] for step in steps if step["value"] is None or value >= step["value"]]
    return reached[-1] if reached else COLOURS[0]


def draw_bars(axes: Any, panel: dict[str, Any], lines: list[Line]) -> None:
    names, values = [name for name, _, _ in lines], [entry[0] for _, _, entry in lines]
    colours = [threshold_colour(panel, value) for value in values]
    axes.barh(range(len(names)), values, color=colours)
    axes.set_yticks(range(len(names)), names, size=4.5)
    axes.set_xlim(0, 1)
    axes.invert_yaxis()


def draw_lines(axes: Any, panel: dict[str, Any], lines: list[Line], end: float) -> None:
    from matplotlib.ticker import FuncFormatter

    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    if "stacking" in defaults.get("custom", {}):
        grid = sorted({at for _, times, _ in lines for at in times})
        rows = [
            [dict(zip(times, values, strict=True)).get(at, float("nan")) for at in grid] for _, times, values in lines
        ]
        rows = [[0.0 if math.isnan(value) else value for value in row] for row in rows]
        minutes = [(at - end) / 60 for at in grid]
        axes.stackplot(minutes, rows, labels=[name for name, _, _ in lines], colors=COLOURS, alpha=0.6)
    else:
        for (name, times, values), colour in zip(lines, COLOURS, strict=False):
            axes.plot([(at - end) / 60 for at in times], values, label=name, color=colour, lw=1.2)
    if defaults.get("min") is not None:
        axes.set_ylim(bottom=defaults["min"])
    if defaults.get("max") is not None:
        axes.set_ylim(top=defaults["max"])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_unit(value, unit)))
    if lines:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, fontsize=6, frameon=False, labelcolor=TEXT
        )


def draw(url: str, minutes: float, out: Path) -> None:
    """Draws the board over the last `minutes` into `out`, a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    board = json.loads(BOARD.read_text())
    end = time.time()
    start = end - 60 * minutes
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = pyplot.figure(figsize=(COLUMNS * CELL[0], height * CELL[1] + 0.4), facecolor=DARK)
    top = 1 - 0.4 / (height * CELL[1] + 0.4)
    figure.text(0.01, 0.5 + top / 2, board["title"], color=TEXT, size=13, va="center")
    drawn = 0
    for panel in board["panels"]:
        box = panel["gridPos"]
        left, bottom = box["x"] / COLUMNS, top * (1 - (box["y"] + box["h"]) / height)
        width, tall = box["w"] / COLUMNS, top * box["h"] / height
        if panel["type"] == "row":
            figure.text(left + 0.01, bottom + tall / 2, panel["title"], color=TEXT, size=10, va="center")
            continue
        frame = (left + 0.002, bottom + 0.002, width - 0.004, tall - 0.004)
        figure.patches.append(
            pyplot.Rectangle(frame[:2], *frame[2:], color=PANEL, transform=figure.transFigure, zorder=-1)
        )
        figure.text(left + 0.007, bottom + tall - 0.007, panel["title"], color=TEXT, size=7.5, va="top")
        inner = (left + 0.04, bottom + 0.3 * tall, width - 0.05, 0.52 * tall)
        if panel["type"] == "bargauge":
            inner = (left + 0.04, bottom + 0.08 * tall, width - 0.05, 0.78 * tall)
        axes = figure.add_axes(inner, facecolor=PANEL)
        axes.tick_params(colors=DIM, labelsize=6, length=2)
        axes.grid(color="#2c3235", lw=0.5)
        for spine in axes.spines.values():
            spine.set_visible(False)
        lines = series(panel, url, start, end)
        drawn += bool(lines)
        if panel["type"] == "stat":
            draw_stat(axes, panel, lines)
        elif panel["type"] == "bargauge":
            draw_bars(axes, panel, lines)
        else:
            draw_lines(axes, panel, lines, end)
            axes.set_xlim(-minutes, 0)
    if not drawn:
        raise DrawError(f"the Prometheus at {url} has no series of the dashboard: let it scrape a server first")
    temporary = out.with_suffix(".part.png")
    figure.savefig(temporary, dpi=130, facecolor=DARK)
    temporary.replace(out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draws the Grafana dashboard from a running Prometheus.")
    parser.add_argument("out", type=Path, metavar="OUT.png")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how far back to look (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        draw(options.prometheus, options.minutes, options.out)
    except DrawError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
