"""The last step of a calibration: a gamma for each KV head."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_sparse.calibrate.measure import Result
from sglang_sparse.calibrate.search import EVERYTHING, Choice, Measure, around, changed, traded
from sglang_sparse.calibrate.settings import Setting

STEPS = (-6, -3, -1, 1, 3)
"""Gammas that a head may take, in steps of `search.GAMMAS` from the one that fits all heads."""
ROUNDS = 8
"""Settings that are measured to find the price."""


def by_head(measure: Measure, measure_few: Measure, start: Result, target: float) -> Result:
    """A gamma for each KV head, or dense layers, if that reads less than `start`, which is `search.uniform`'s.

    `measure_few` measures on few prompts. It serves to measure each head alone, at several gammas, while other heads
    read everything; what is returned holds the target on the prompts of `measure`.
    """
    setting = start.setting
    layers, heads = len(start.kept_by_head), len(start.kept_by_head[0])
    gammas = around(setting.options.gamma, STEPS)
    choices: list[list[Choice]] = []
    scanned: list[float] = []
    for layer in range(layers):
        # Layer by layer: the results of all heads of a large model would take gigabytes.
        measured = measure_few(
            [_alone(setting, layer, head, gamma, layers, heads) for head in range(heads) for gamma in gammas]
        )
        for head in range(heads):
            own = measured[head * len(gammas) : (head + 1) * len(gammas)]
            choices.append(
                [Choice(r.kept_by_head[layer][head], r.kl_mean, gamma) for r, gamma in zip(own, gammas, strict=True)]
                + [EVERYTHING]
            )
        scanned.append(measured[0].bytes_by_layer[layer] - sum(measured[0].kept_by_head[layer]) / heads)

    def made(chosen: Sequence[Choice]) -> Setting:
        by_layer = [chosen[layer * heads : (layer + 1) * heads] for layer in range(layers)]
        # Where the scan costs more than it saves, reading everything is both cheaper and exact.
        dense = [
            layer
            for layer, own in enumerate(by_layer)
            if sum(choice.read for choice in own) / heads + scanned[layer] >= 1
        ]
        gammas_of = [
            [1.0 if layer in dense or choice.gamma is None else choice.gamma for choice in own]
            for layer, own in enumerate(by_layer)
        ]
        return _by_head(setting, gammas_of, dense)

    return traded(measure, choices, made, start, target, ROUNDS)


def _alone(setting: Setting, layer: int, head: int, gamma: float, layers: int, heads: int) -> Setting:
    """One head at `gamma`; all others, those of its own layer included, read everything."""
    gammas = [[1.0] * heads for _ in range(layers)]
    gammas[layer][head] = gamma
    return _by_head(setting, gammas, [other for other in range(layers) if other != layer])


def _by_head(setting: Setting, gammas: Sequence[Sequence[float]], dense: Sequence[int]) -> Setting:
    return changed(setting, gamma_by_head=tuple(map(tuple, gammas)), dense_layers=tuple(dense))
