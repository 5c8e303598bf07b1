"""The needle grid as a PNG."""

from __future__ import annotations

import io
from typing import Any

from sglang_sparse.evaluate.lm_eval_parts import require


def check_package() -> None:
    """Raises if matplotlib is missing."""
    require("matplotlib.backends.backend_agg")


def heat_map(grid: dict[str, Any], title: str) -> bytes:
    """A PNG of `grid`, as `needle.grid` makes it: lengths to the right, depths downwards, green for found."""
    figure = require("matplotlib.figure").Figure(
        figsize=(2.5 + 0.8 * len(grid["lengths"]), 1.8 + 0.32 * len(grid["depths"])), layout="constrained"
    )
    # Without pyplot, which would look for a display.
    canvas = require("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(grid["scores"], vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(grid["lengths"])), [str(length) for length in grid["lengths"]])
    axes.set_yticks(range(len(grid["depths"])), [f"{depth:g}%" for depth in grid["depths"]])
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("depth of the fact")
    axes.set_title(title)
    for y, scores in enumerate(grid["scores"]):
        for x, score in enumerate(scores):
            axes.text(x, y, f"{score:.2f}", ha="center", va="center", fontsize=7)
    figure.colorbar(image, label="share found")
    output = io.BytesIO()
    canvas.print_png(output, metadata={"Software": None})
    return output.getvalue()
