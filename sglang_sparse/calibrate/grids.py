"""Sets of settings to measure side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sglang_sparse.calibrate.search import changed, server_estimators
from sglang_sparse.calibrate.settings import Setting
from sglang_sparse.options import SparseDecodeOptions

DEFAULT_GAMMAS = (0.9, 0.95, 0.98, 0.99)


def server_grid(base: Setting, gammas: Sequence[float]) -> list[Setting]:
    """Every estimator of the server at every gamma, `exact` first; with the server's tail unless `base` has one."""
    estimators: list[dict[str, Any]] = [{"estimator": "exact"}, *server_estimators()]
    return [changed(base, gamma=gamma, **estimator) for estimator in estimators for gamma in gammas]


def delta_grid(base: Setting, deltas: Sequence[float]) -> list[Setting]:
    """Rule top-delta: exact scores, thumbnails with and without the tail, and FFD's symmetric code, at every delta."""
    estimators: list[dict[str, Any]] = [{"estimator": "exact"}]
    estimators += [{"estimator": "thumbnail", "thumbnail_bits": bits} for bits in (4, 3, 2)]
    estimators += [{"estimator": "thumbnail", "thumbnail_bits": 4, "tail": "drop"}]
    grid = [changed(base, rule="top-delta", delta=delta, **estimator) for estimator in estimators for delta in deltas]
    ffd = dataclasses.replace(base, candidate="symmetric-2bit")
    return grid + [changed(ffd, rule="top-delta", delta=delta) for delta in deltas]


def frontier_grid(gammas: Sequence[float]) -> list[Setting]:
    """What was tried on the way to the default estimator: all estimators, page sizes, block sizes and treatments.

    The sweep over `gammas` is for the main line of candidates; everything else is measured at gamma .95. Blocks that
    are not read are dropped, but in the rows whose estimator names a tail.
    """
    options = SparseDecodeOptions(tail="drop", gamma=0.95)
    swept = [
        Setting(dataclasses.replace(options, **estimator))
        for estimator in ({"estimator": "exact"}, *server_estimators())
    ]
    swept += [Setting(options, candidate=name) for name in ("symmetric-2bit", "bound+asymmetric-4bit")]
    grid = [changed(setting, gamma=gamma) for setting in swept for gamma in gammas]
    for bits in (2, 3, 4):
        copy = f"asymmetric-{bits}bit"
        grid += [Setting(options, page_size=page, candidate=copy) for page in (16, 32, 128)]
        grid += [Setting(dataclasses.replace(options, block_size=size), candidate=copy) for size in (8, 32)]
        grid += [Setting(options, page_size=page, candidate=f"{copy}-fp8") for page in (16, 32, 64, 128)]
        grid += [Setting(options, candidate=f"{copy}-rotated")]
        grid += [Setting(dataclasses.replace(options, thumbnail_bits=bits, group="every"))]
        grid += [Setting(dataclasses.replace(options, thumbnail_bits=bits), tail=tail) for tail in (16, 256)]
        grid += [Setting(options, candidate=f"mean+{copy}")]
    grid += [Setting(options, candidate=f"means-{count}-fp8") for count in (2, 4, 8)]
    grid += [Setting(options, candidate="bound+asymmetric-2bit")]
    grid += [Setting(dataclasses.replace(options, estimator="mean", block_size=size)) for size in (8, 32)]
    grid += [Setting(dataclasses.replace(options, estimator="exact", group="every"))]
    grid += [Setting(dataclasses.replace(options, gamma=0.98), value_norm=True)]
    grid += [
        Setting(dataclasses.replace(options, gamma=0.98), candidate=f"asymmetric-{bits}bit-unbiased", tail=tail)
        for bits in (2, 3)
        for tail in (0, 64)
    ]
    # What the server does: its tail, around its default gamma.
    default = SparseDecodeOptions()
    grid += [Setting(dataclasses.replace(default, thumbnail_bits=2, gamma=gamma)) for gamma in (0.95, 0.975)]
    for bits in (3, 4):
        served = Setting(dataclasses.replace(default, thumbnail_bits=bits))
        grid += [changed(served, gamma=gamma) for gamma in (0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99)]
        grid += [changed(served, gamma=gamma, block_size=8) for gamma in (0.97, 0.975, 0.98)]
        grid += [changed(served, gamma=gamma, group="every") for gamma in (0.9, 0.93, 0.95)]
    grid += [Setting(dataclasses.replace(default, rule="top-k", top_k=share)) for share in (0.1, 0.2)]
    return grid
