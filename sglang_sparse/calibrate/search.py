"""Calibration: the setting that reads the fewest bytes while the mean KL to dense stays within a target.

First one gamma for all layers is bisected for each estimator and group treatment. Then the best of them gets a gamma of
its own in each layer, or in each KV head: each is made sparse alone, at several gammas, and the bytes and KL of all of
them, taken as additive, are traded against each other by one multiplier, which real measurements of the whole setting
bisect. That KL is additive is an assumption; whether the target holds is measured.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sglang_sparse.calibrate.measure import Result
from sglang_sparse.calibrate.settings import Setting
from sglang_sparse.options import GROUPS, THUMBNAIL_BITS, ModelShape, SparseDecodeOptions

GAMMAS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.993, 0.996, 0.999)
LAYER_STEPS = (-6, -3, -1, 0, 1, 3)
"""Gammas that a layer may take, in steps of GAMMAS from the one that fits all layers."""
WORTH = 0.98
"""Gammas for each layer or head have to read less than this share of what one gamma for all reads."""
LAYER_ROUNDS = 7
"""Settings that are measured to find the price."""

Measure = Callable[[Sequence[Setting]], list[Result]]


class Choice(NamedTuple):
    """What a layer or KV head may do."""

    read: float
    """Share of its bytes."""
    kl: float
    """Mean KL where it alone is sparse."""
    gamma: float | None
    """None reads everything."""


EVERYTHING = Choice(1.0, 0.0, None)


def server_estimators() -> list[dict[str, Any]]:
    """Options of the estimators that are searched: those that guess masses, but `exact` and `ffd`, which is `thumbnail`
    with other codes of two bits and larger errors."""
    thumbnails = [{"estimator": "thumbnail", "thumbnail_bits": bits} for bits in THUMBNAIL_BITS]
    return [*thumbnails, *({"estimator": name} for name in ("mean", "mean-variance", "minmax"))]


def uniform(measure: Measure, base: Setting, target: float) -> Result | None:
    """The fewest bytes with one gamma, over all estimators and group treatments; None if none holds the target."""
    best: Result | None = None
    for estimator, group in itertools.product(server_estimators(), GROUPS):
        found = smallest_gamma(measure, changed(base, group=group, **estimator), target, best)
        if found is not None and (best is None or found.bytes_read < best.bytes_read):
            best = found
    return best


def smallest_gamma(measure: Measure, setting: Setting, target: float, best: Result | None) -> Result | None:
    """Bisects GAMMAS for the smallest that holds the target. Gives up where `best` reads less in any case."""
    low, high = 0, len(GAMMAS)
    found = None
    while low < high:
        middle = (low + high) // 2
        (result,) = measure([changed(setting, gamma=GAMMAS[middle])])
        if result.kl_mean <= target:
            found, high = result, middle
        else:
            if best is not None and result.bytes_read >= best.bytes_read:
                return None
            low = middle + 1
    return found


def by_layer(measure: Measure, start: Result, target: float) -> Result:
    """A gamma for each layer, or dense layers, if that reads less than `start`, which is `uniform`'s."""
    setting = start.setting
    layers = len(start.kept_by_head)
    gammas = around(setting.options.gamma, LAYER_STEPS)
    alone = [
        changed(setting, gamma=gamma, dense_layers=tuple(other for other in range(layers) if other != layer))
        for layer in range(layers)
        for gamma in gammas
    ]
    measured = measure(alone)
    choices: list[list[Choice]] = []
    for layer in range(layers):
        own = measured[layer * len(gammas) : (layer + 1) * len(gammas)]
        choices.append(
            [Choice(r.bytes_by_layer[layer], r.kl_mean, gamma) for r, gamma in zip(own, gammas, strict=True)]
            + [EVERYTHING]
        )

    def made(chosen: Sequence[Choice]) -> Setting:
        return _by_layer(setting, [choice.gamma for choice in chosen])

    return traded(measure, choices, made, start, target, LAYER_ROUNDS)


def around(gamma: float, steps: Sequence[int]) -> list[float]:
    """Gammas that lie `steps` of GAMMAS from `gamma`, ascending and each once."""
    index = GAMMAS.index(gamma)
    return sorted({GAMMAS[min(max(index + step, 0), len(GAMMAS) - 1)] for step in steps})


def traded(
    measure: Measure,
    choices: Sequence[Sequence[Choice]],
    made: Callable[[Sequence[Choice]], Setting],
    start: Result,
    target: float,
    rounds: int,
) -> Result:
    """The measured setting with the fewest bytes that holds the target, of those that trade the parts' KL for bytes at
    one price; `start` unless that is worth it.

    Args:
        choices: of each part of the model, what it may do.
        made: the setting in which each part does what was chosen for it.
        rounds: settings to measure.
    """
    best = start
    # The price of a nat of KL in bytes: high prices keep parts dense, low ones let them read little.
    low, high = 1e-3, 1e6
    for _ in range(rounds):
        price = (low * high) ** 0.5
        (result,) = measure([made([min(own, key=lambda c: c.read + price * c.kl) for own in choices])])
        if result.kl_mean <= target:
            high = price
            if result.bytes_read < best.bytes_read:
                best = result
        else:
            low = price
    return best if best.bytes_read < WORTH * start.bytes_read else start


def raised(setting: Setting) -> Setting | None:
    """The setting one step of GAMMAS higher in each layer or head; None if there is no higher one."""
    options = setting.options

    def up(gamma: float) -> float:
        return next((g for g in GAMMAS if g > gamma), 1.0)

    if options.gamma_by_head:
        by_head = tuple(tuple(map(up, layer)) for layer in options.gamma_by_head)
        return None if by_head == options.gamma_by_head else changed(setting, gamma_by_head=by_head)
    if options.gamma_by_layer:
        higher = tuple(map(up, options.gamma_by_layer))
        return None if higher == options.gamma_by_layer else changed(setting, gamma_by_layer=higher)
    return None if options.gamma == 1 else changed(setting, gamma=up(options.gamma))


def to_config(result: Result, shape: ModelShape) -> dict[str, Any]:
    """What `--sparse-decode-config` takes: only what the calibration decided."""
    options, default = result.setting.options, SparseDecodeOptions()
    config: dict[str, Any] = {
        "model": dataclasses.asdict(shape),
        "page_size": result.setting.page_size,
        "estimator": options.estimator,
        "block_size": options.block_size,
        "group": options.group,
        "rule": "coverage",
        "sink_tokens": options.sink_tokens,
        "window_tokens": options.window_tokens,
        "tail": options.resolved_tail,
    }
    if options.estimator == "thumbnail":
        config["thumbnail_bits"] = options.thumbnail_bits
    if options.gamma_by_head:
        config["gamma_by_head"] = [list(layer) for layer in options.gamma_by_head]
    elif options.gamma_by_layer:
        config["gamma_by_layer"] = list(options.gamma_by_layer)
    else:
        config["gamma"] = options.gamma
    if options.dense_layers != default.dense_layers:
        config["dense_layers"] = list(options.dense_layers)
    return config


def changed(setting: Setting, **options: Any) -> Setting:
    """The setting with some of its options changed."""
    return dataclasses.replace(setting, options=dataclasses.replace(setting.options, **options))


def _by_layer(setting: Setting, chosen: Sequence[float | None]) -> Setting:
    """A gamma for each layer; None makes the layer dense."""
    dense = tuple(layer for layer, gamma in enumerate(chosen) if gamma is None)
    gammas = tuple(1.0 if gamma is None else gamma for gamma in chosen)
    return changed(setting, gamma_by_layer=gammas, dense_layers=dense)
