"""An evaluation as a table, a CSV file and a picture."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

from .evaluation import Tallies, layer_mean, pooled, predictors

LAYER_BUDGET = 1.5
"""Whose recall is shown by layer."""


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def rows_of(tallies: Tallies, budgets: tuple[float, ...]) -> list[list[str]]:
    """Header and a row for each predictor: recall of the set, then of new blocks by budget."""
    made = [
        ["predictor", "recall of the set", *(f"new, {b:g}x" for b in budgets), *(f"pooled, {b:g}x" for b in budgets)]
    ]
    for name in predictors(tallies):
        own = [tally for (who, _), tally in tallies.items() if who == name]
        recall = layer_mean([tally.recall() for tally in own])
        means = [layer_mean([tally.new_recall(b) for tally in own]) for b in budgets]
        made.append([name, *map(_percent, [recall, *means, *(pooled(tallies, name, b) for b in budgets)])])
    return made


def markdown(tallies: Tallies, budgets: tuple[float, ...]) -> str:
    """The table as Markdown, which is readable as text too."""
    head, *body = rows_of(tallies, budgets)
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *body]]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def as_csv(tallies: Tallies, budgets: tuple[float, ...], about: dict[str, Any]) -> bytes:
    """A row for each predictor and layer."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    shown = [f"new_recall_{b:g}" for b in budgets] + [f"new_recall_even_{b:g}" for b in budgets]
    writer.writerow([*about, "predictor", "layer", "new_blocks", "kept_blocks", "recall", *shown])
    for (name, layer), tally in tallies.items():
        recalls = [tally.new_recall(b, evenly) for evenly in (False, True) for b in budgets]
        cells = ["" if math.isnan(value) else f"{value:.4f}" for value in (tally.recall(), *recalls)]
        writer.writerow([*about.values(), name, layer, tally.new, tally.wanted, *cells])
    return text.getvalue().encode()


def draw(tallies: Tallies, budgets: tuple[float, ...], title: str) -> bytes:
    """A PNG: recall of new blocks against bytes, and by layer at one budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    at = LAYER_BUDGET if LAYER_BUDGET in budgets else budgets[0]
    for name in predictors(tallies)[1:]:
        own = {layer: tally for (who, layer), tally in tallies.items() if who == name}
        left.plot(
            budgets, [layer_mean([t.new_recall(b) for t in own.values()]) for b in budgets], marker="o", label=name
        )
        right.plot(list(own), [tally.new_recall(at) for tally in own.values()], marker=".", label=name)
    left.set(xlabel="blocks prefetched ÷ blocks that a step misses", ylabel="recall of new blocks, mean of layers")
    right.set(xlabel="layer", ylabel=f"recall of new blocks at {at:g}x")
    for axes in (left, right):
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    pyplot.close(figure)
    return content.getvalue()
