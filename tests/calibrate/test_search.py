from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from sglang_sparse.calibrate import search
from sglang_sparse.calibrate.calibration import confirm
from sglang_sparse.calibrate.head_search import by_head
from sglang_sparse.calibrate.measure import Result
from sglang_sparse.calibrate.settings import Setting
from sglang_sparse.options import ModelShape, SparseDecodeOptions

LAYERS, HEADS = 4, 2
BASE = Setting(SparseDecodeOptions())
WEIGHTS = ((5.0, 5.0), (0.05, 0.05), (0.05, 0.05), (0.05, 0.05))
"""How much a head's missing mass counts, by layer: the first layer matters most."""
UNLIKE = ((9.0, 0.1), (0.02, 0.5), (0.02, 0.5), (0.02, 0.5))
"""In each layer one head matters and the other hardly does."""
SCAN = {"thumbnail": 0.08, "mean": 0.03, "mean-variance": 0.06, "minmax": 0.06}
ERROR = {"thumbnail": 1.0, "mean": 30.0, "mean-variance": 20.0, "minmax": 20.0}


class Model:
    """A made-up model in which a head that covers gamma reads gamma^8 and adds (1 - gamma)^2 of its weight in KL."""

    def __init__(self) -> None:
        self.measured: list[Setting] = []

    def __call__(self, settings: Sequence[Setting]) -> list[Result]:
        self.measured.extend(settings)
        return [self.result(setting) for setting in settings]

    def result(self, setting: Setting) -> Result:
        options = setting.options
        dense = set(options.dense_layers)
        gammas = [(1.0,) * HEADS if layer in dense else options.head_gammas(layer, HEADS) for layer in range(LAYERS)]
        every = options.group == "every"
        kept_by_head = [
            [1.0 if layer in dense else g**8 * (1.1 if every else 1.0) for g in own] for layer, own in enumerate(gammas)
        ]
        kept = [sum(own) / HEADS for own in kept_by_head]
        scan = SCAN[options.estimator] * options.thumbnail_bits / 2
        read = [k + (0 if layer in dense else scan) for layer, k in enumerate(kept)]
        error = ERROR[options.estimator] * (4 - options.thumbnail_bits + 1) * (0.9 if every else 1.0)
        kl = sum(
            w * (1 - g) ** 2 * error
            for weights, own in zip(WEIGHTS, gammas, strict=True)
            for w, g in zip(weights, own, strict=True)
        )
        nothing = [[0.0]] * LAYERS
        return Result(
            setting=setting,
            prompts=1,
            positions=1,
            kl_mean=kl,
            kl_p99=kl,
            kl_max=kl,
            kl_by_prompt={},
            agreement=1.0,
            coverage_mean=1.0,
            coverage_p1=1.0,
            kept=sum(kept) / LAYERS,
            bytes_read=sum(read) / LAYERS,
            kept_by_head=kept_by_head,
            coverage_by_head=nothing,
            coverage_p1_by_head=nothing,
            bytes_by_layer=read,
        )


def test_uniform_finds_the_fewest_bytes_of_all() -> None:
    model = Model()
    target = 0.01
    best = search.uniform(model, BASE, target)
    assert best is not None
    everything = [
        model.result(search.changed(BASE, gamma=gamma, group=group, **estimator))
        for gamma in search.GAMMAS
        for group in ("average", "every")
        for estimator in search.server_estimators()
    ]
    fewest = min(result.bytes_read for result in everything if result.kl_mean <= target)
    assert best.kl_mean <= target
    assert best.bytes_read == fewest
    assert len(model.measured) < len(everything) / 2


def test_nothing_is_found_where_nothing_holds() -> None:
    assert search.uniform(Model(), BASE, 1e-9) is None


def test_layers_that_matter_less_read_less() -> None:
    model = Model()
    start = search.uniform(model, BASE, 0.01)
    assert start is not None
    best = search.by_layer(model, start, 0.01)
    gammas = best.setting.options.gamma_by_layer
    assert best.kl_mean <= 0.01
    assert best.bytes_read < 0.9 * start.bytes_read
    first = 1.0 if 0 in best.setting.options.dense_layers else gammas[0]
    assert first > gammas[1] == gammas[2] == gammas[3]


def test_one_gamma_stays_where_layers_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_search.WEIGHTS", ((0.5, 0.5),) * LAYERS)
    model = Model()
    start = search.uniform(model, BASE, 0.004)
    assert start is not None
    best = search.by_layer(model, start, 0.004)
    assert best.bytes_read <= start.bytes_read
    assert best is start or best.bytes_read < search.WORTH * start.bytes_read


def test_heads_that_matter_less_read_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_search.WEIGHTS", UNLIKE)
    model, few = Model(), Model()
    start = search.uniform(model, BASE, 0.01)
    assert start is not None
    layered = search.by_layer(model, start, 0.01)
    measured = len(model.measured)
    best = by_head(model, few, start, 0.01)
    options = best.setting.options
    assert best.kl_mean <= 0.01
    assert best.bytes_read < 0.95 * layered.bytes_read < layered.bytes_read < start.bytes_read
    assert not options.gamma_by_layer
    gammas = [
        (1.0,) * HEADS if layer in options.dense_layers else options.gamma_by_head[layer] for layer in range(LAYERS)
    ]
    assert gammas[0][0] > gammas[0][1]
    for layer in range(1, LAYERS):
        assert gammas[0][0] > gammas[layer][1] > gammas[layer][0]
    # All heads alone on few prompts, and only whole settings on all of them.
    assert len(few.measured) == LAYERS * HEADS * 5
    assert all(len(setting.options.dense_layers) == LAYERS - 1 for setting in few.measured)
    assert len(model.measured) - measured == 8
    assert best.setting in model.measured


def test_one_gamma_stays_where_heads_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_search.WEIGHTS", ((0.5, 0.5),) * LAYERS)
    model = Model()
    start = search.uniform(model, BASE, 0.004)
    assert start is not None
    best = by_head(model, model, start, 0.004)
    assert best is start or best.bytes_read < search.WORTH * start.bytes_read


def test_layers_that_save_less_than_their_scan_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads of the first layer ask for so much that its scan would be lost."""
    monkeypatch.setattr("test_search.WEIGHTS", ((1e4, 1e4), *((0.01, 0.1),) * 3))
    model = Model()
    start = search.uniform(model, BASE, 0.1)
    assert start is not None
    best = by_head(model, model, start, 0.1)
    assert best.setting.options.dense_layers == (0,)
    assert best.setting.options.gamma_by_head[0] == (1.0, 1.0)
    assert best.bytes_by_layer[0] == 1
    assert best.bytes_read < 0.9 * start.bytes_read


def test_raising_ends_at_everything() -> None:
    setting: Setting | None = search.changed(BASE, gamma=0.95)
    seen = []
    while setting is not None:
        seen.append(setting.options.gamma)
        setting = search.raised(setting)
    assert seen == [*(gamma for gamma in search.GAMMAS if gamma >= 0.95), 1.0]
    by_layer = search.raised(search.changed(BASE, gamma_by_layer=(0.9, 1.0)))
    assert by_layer is not None
    assert by_layer.options.gamma_by_layer == (0.92, 1.0)
    heads = search.raised(search.changed(BASE, gamma_by_head=((0.9, 1.0), (0.999, 0.5))))
    assert heads is not None
    assert heads.options.gamma_by_head == ((0.92, 1.0), (1.0, 0.6))
    assert search.raised(search.changed(BASE, gamma_by_head=((1.0, 1.0),))) is None


def test_what_held_out_prompts_ask_for_is_raised_until_it_holds() -> None:
    measure = Model()

    def check(settings: Sequence[Setting]) -> list[Result]:
        return [dataclasses.replace(result, kl_mean=4 * result.kl_mean) for result in Model()(settings)]

    by_head = ((0.9, 0.8), (0.99, 0.9), (0.9, 0.9), (0.9, 0.9))
    (start,) = measure([search.changed(BASE, gamma_by_head=by_head)])
    best, confirmed, raises = confirm(measure, check, start, start.kl_mean)
    assert raises == 3
    assert best.setting == confirmed.setting == measure.measured[-1]
    assert best.setting.options.gamma_by_head[0] == (0.95, 0.9)
    assert confirmed.kl_mean <= start.kl_mean < 4 * measure.result(measure.measured[-2]).kl_mean
    assert confirm(measure, measure, start, start.kl_mean) == (start, start, 0)


def test_a_config_gives_the_measured_options_back() -> None:
    shape = ModelShape("Qwen2ForCausalLM", LAYERS, 2, 64)
    for options in (
        SparseDecodeOptions(gamma=0.97, thumbnail_bits=3, group="every", block_size=8),
        SparseDecodeOptions(estimator="mean", gamma_by_layer=(0.9, 0.8, 1.0, 0.7), dense_layers=(2,)),
        SparseDecodeOptions(gamma_by_head=((0.9, 0.8), (0.7, 1.0), (1.0, 1.0), (0.5, 0.6)), dense_layers=(2,)),
    ):
        result = Model().result(Setting(options, page_size=32))
        config = SparseDecodeOptions.from_mapping(search.to_config(result, shape))
        assert config.page_size == 32
        assert config.model == shape
        assert config.tail == options.resolved_tail
        for name in vars(options):
            if name not in ("model", "page_size", "min_context", "tail") and not (
                name == "gamma" and (options.gamma_by_layer or options.gamma_by_head)
            ):
                assert getattr(config, name) == getattr(options, name), name
