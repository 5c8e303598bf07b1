"""Options: defaults, sources, precedence and every wrong value."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_sparse import option_sources
from sglang_sparse import options as module
from sglang_sparse.option_sources import merge
from sglang_sparse.option_values import parse_json
from sglang_sparse.options import OptionsError, SparseDecodeOptions


def parse(*arguments: str) -> SparseDecodeOptions | None:
    parser = argparse.ArgumentParser()
    option_sources.add_flags(parser)
    return option_sources.pop_flags(parser.parse_args(arguments))


def test_defaults_are_those_of_the_object() -> None:
    assert parse("--sparse-decode") == SparseDecodeOptions()


def test_without_the_flag_nothing_is_returned_or_left_behind() -> None:
    parser = argparse.ArgumentParser()
    option_sources.add_flags(parser)
    namespace = parser.parse_args([])
    assert option_sources.pop_flags(namespace) is None
    assert vars(namespace) == {}


def test_help_shows_every_option_with_its_default(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for name, default in vars(SparseDecodeOptions()).items():
        if name in module.CONFIG_ONLY:
            continue
        assert module.flag(name) in text
        shown = "off" if default is False else "none" if default in (None, ()) else default
        assert f"(default: {shown})" in text
    assert "--sparse-decode-config" in text


def test_flags_reach_their_options() -> None:
    options = parse(
        *[
            "--sparse-decode",
            "--sparse-decode-rule",
            "top-k",
            "--sparse-decode-top-k",
            "0.2",
            "--sparse-decode-estimator",
            "minmax",
        ],
        *["--sparse-decode-block-size", "32", "--sparse-decode-group", "every", "--sparse-decode-min-context", "100"],
        *[
            "--sparse-decode-sink-tokens",
            "4",
            "--sparse-decode-window-tokens",
            "64",
            "--sparse-decode-dense-layers",
            "0,2-4",
        ],
        *["--sparse-decode-gamma", "0.9", "--sparse-decode-thumbnail-bits", "4"],
        *["--sparse-decode-audit-rate", "0.5", "--sparse-decode-tail", "drop"],
        "--sparse-decode-allow-untested-sglang",
    )
    assert options == SparseDecodeOptions(
        gamma=0.9,
        estimator="minmax",
        thumbnail_bits=4,
        block_size=32,
        group="every",
        rule="top-k",
        top_k=0.2,
        min_context=100,
        sink_tokens=4,
        window_tokens=64,
        dense_layers=(0, 2, 3, 4),
        audit_rate=0.5,
        tail="drop",
        allow_untested_sglang=True,
    )


def test_flags_win_over_the_config_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "sparse.json"
    file.write_text(json.dumps({"gamma": 0.8, "min-context": 10, "dense_layers": [1]}))
    options = parse("--sparse-decode", "--sparse-decode-config", str(file), "--sparse-decode-gamma", "0.7")
    assert options == SparseDecodeOptions(gamma=0.7, min_context=10, dense_layers=(1,))


def test_environment_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.ENVIRONMENT_VARIABLE, raising=False)
    assert SparseDecodeOptions.from_environment() is None
    options = SparseDecodeOptions(gamma=0.5, dense_layers=(3, 1))
    monkeypatch.setenv(module.ENVIRONMENT_VARIABLE, options.to_json())
    assert SparseDecodeOptions.from_environment() == options


@pytest.mark.parametrize(
    ("estimator", "resolved"),
    [
        ("thumbnail", "mean"),
        ("exact", "mean"),
        ("ffd", "drop"),
        ("mean", "drop"),
        ("mean-variance", "drop"),
        ("minmax", "drop"),
    ],
)
def test_the_tail_follows_the_estimator_unless_given(estimator: str, resolved: str) -> None:
    options = SparseDecodeOptions(estimator=estimator)
    assert options.tail is None
    assert options.resolved_tail == resolved
    assert SparseDecodeOptions(estimator=estimator, tail="drop").resolved_tail == "drop"
    if resolved == "mean":
        assert SparseDecodeOptions(estimator=estimator, tail="mean").resolved_tail == "mean"
    else:
        with pytest.raises(OptionsError, match=f"--sparse-decode-tail mean.*--sparse-decode-estimator {estimator}"):
            SparseDecodeOptions(estimator=estimator, tail="mean")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"gamma": 0}, "--sparse-decode-gamma"),
    ({"gamma": 1.01}, "--sparse-decode-gamma"),
    ({"gamma": float("nan")}, "--sparse-decode-gamma"),
    ({"gamma": "0.9"}, "--sparse-decode-gamma"),
    ({"gamma": True}, "--sparse-decode-gamma"),
    ({"estimator": "magic"}, "--sparse-decode-estimator"),
    ({"rule": "magic"}, "--sparse-decode-rule"),
    ({"tail": "magic"}, "--sparse-decode-tail"),
    ({"tail": True}, "--sparse-decode-tail"),
    ({"group": "some"}, "--sparse-decode-group"),
    ({"thumbnail_bits": 5}, "--sparse-decode-thumbnail-bits"),
    ({"block_size": 12}, "--sparse-decode-block-size"),
    ({"rule": "top-k"}, "--sparse-decode-top-k"),
    ({"rule": "top-k", "top_k": 0}, "--sparse-decode-top-k"),
    ({"rule": "top-k", "top_k": -3}, "--sparse-decode-top-k"),
    ({"rule": "top-k", "top_k": 2.5}, "--sparse-decode-top-k"),
    ({"top_k": 3}, "--sparse-decode-top-k"),
    ({"delta": 6}, "--sparse-decode-delta has no effect with --sparse-decode-rule coverage"),
    ({"rule": "top-delta", "delta": 0}, "--sparse-decode-delta is 0: give a number of nats above 0"),
    ({"rule": "top-delta", "delta": -1.5}, "--sparse-decode-delta"),
    ({"rule": "top-delta", "delta": float("nan")}, "--sparse-decode-delta"),
    ({"rule": "top-delta", "delta": float("inf")}, "--sparse-decode-delta"),
    ({"rule": "top-delta", "delta": "six"}, "--sparse-decode-delta"),
    ({"rule": "top-delta", "estimator": "mean"}, "--sparse-decode-rule top-delta .* --sparse-decode-estimator mean"),
    ({"path": "quick"}, "--sparse-decode-path"),
    ({"path": "fused"}, "--sparse-decode-path fused does not go with --sparse-decode-rule coverage"),
    (
        {"estimator": "ffd", "thumbnail_bits": 3},
        "--sparse-decode-estimator ffd does not go with --sparse-decode-thumbnail-bits 3",
    ),
    (
        {"path": "fused", "rule": "top-delta", "estimator": "exact"},
        "--sparse-decode-path fused does not go with --sparse-decode-estimator exact",
    ),
    ({"min_context": -1}, "--sparse-decode-min-context"),
    ({"min_context": 1.5}, "--sparse-decode-min-context"),
    ({"sink_tokens": -1}, "--sparse-decode-sink-tokens"),
    ({"window_tokens": 0}, "--sparse-decode-window-tokens"),
    ({"audit_rate": -0.1}, "--sparse-decode-audit-rate"),
    ({"audit_rate": 1.1}, "--sparse-decode-audit-rate"),
    ({"audit_rate": float("nan")}, "--sparse-decode-audit-rate"),
    ({"audit_rate": "often"}, "--sparse-decode-audit-rate"),
    ({"dense_layers": "a"}, "--sparse-decode-dense-layers"),
    ({"dense_layers": "3-1"}, "--sparse-decode-dense-layers"),
    ({"dense_layers": [-1]}, "--sparse-decode-dense-layers"),
    ({"dense_layers": 3}, "--sparse-decode-dense-layers"),
    ({"dense_layers": "²"}, "--sparse-decode-dense-layers"),
    ({"dense_layers": "0-99999999999"}, "--sparse-decode-dense-layers"),
    ({"thumbnail_bits": 4.0}, "--sparse-decode-thumbnail-bits"),
    ({"block_size": 16.0}, "--sparse-decode-block-size"),
    ({"gamma": 10**400}, "--sparse-decode-gamma"),
    ({"gamma": float("inf")}, "--sparse-decode-gamma"),
    ({"sink_tokens": 2**40}, "--sparse-decode-sink-tokens"),
    ({"min_context": 10**20}, "--sparse-decode-min-context"),
    ({"allow_untested_sglang": 1}, "--sparse-decode-allow-untested-sglang"),
]


@pytest.mark.parametrize(("values", "named"), WRONG)
def test_wrong_values_name_their_flag_in_one_line(values: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionsError, match=named) as caught:
        SparseDecodeOptions(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"gamme": 0.9}', "gamme"),
        ('{"min-context": 1, "min_context": 2}', "twice"),
        ("[1]", "JSON object"),
        ('{"gamma": 0.9, "gamma": 0.8}', "twice"),
        ("[" * 100_000, "not valid JSON"),
        ("{", "not valid JSON"),
        (f'{{"top_k": {"1" * 5000}}}', "not valid JSON"),
        (f'{{"{"k" * 5000}": 1, "{"k" * 5000}": 2}}', "key 'k{60}' is given twice"),
        ('{"gamma": 2}', "--sparse-decode-gamma"),
        (None, "cannot be read"),
    ],
)
def test_wrong_config_files_are_named(tmp_path: Path, content: str | None, what: str) -> None:
    file = tmp_path / "sparse.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(OptionsError, match=what):
        parse("--sparse-decode", "--sparse-decode-config", str(file))


def test_json_of_many_keys_is_read_in_time() -> None:
    keys = [f"k{number}" for number in range(100_000)]
    start = time.monotonic()
    assert list(parse_json(json.dumps(dict.fromkeys(keys)), "body")) == keys
    # The server answers nobody else meanwhile.
    assert time.monotonic() - start < 10


def test_options_without_sparse_decode_are_refused() -> None:
    with pytest.raises(OptionsError, match="--sparse-decode-gamma has no effect without --sparse-decode"):
        parse("--sparse-decode-gamma", "0.9")


@pytest.mark.parametrize("page_size", [1, 8, 48, 256])
def test_page_sizes_without_support_are_refused(page_size: int) -> None:
    with pytest.raises(OptionsError, match=f"--page-size {page_size}"):
        SparseDecodeOptions().check_page_size(page_size)


def test_the_block_size_must_divide_the_page_size() -> None:
    with pytest.raises(OptionsError, match="--sparse-decode-block-size 64 does not divide --page-size 32"):
        SparseDecodeOptions(block_size=64).check_page_size(32)
    for page_size in module.PAGE_SIZES:
        SparseDecodeOptions().check_page_size(page_size)


def test_dense_layers_must_exist() -> None:
    SparseDecodeOptions(dense_layers=(1,)).check_layers(2, 2)
    with pytest.raises(OptionsError, match="layer 2"):
        SparseDecodeOptions(dense_layers=(1, 2)).check_layers(2, 2)


SHAPE = {"architecture": "Qwen2ForCausalLM", "layers": 2, "kv_heads": 2, "head_dim": 64}


def test_gamma_by_layer_reaches_its_layers_and_survives_the_environment() -> None:
    options = parse("--sparse-decode", "--sparse-decode-gamma-by-layer", "0.9,0.99")
    assert [options.gamma_of(layer) for layer in range(2)] == [0.9, 0.99]
    assert SparseDecodeOptions.from_mapping(json.loads(options.to_json())) == options
    options.check_layers(2, 2)
    with pytest.raises(OptionsError, match="has 2 values, but the model has 3 layers"):
        options.check_layers(3, 2)


@pytest.mark.parametrize("value", ["0.9,", "0.9,2", "x", "0.9,0", [True], 0.9])
def test_wrong_gammas_are_refused(value: object) -> None:
    with pytest.raises(OptionsError, match="gamma-by-layer is"):
        SparseDecodeOptions(gamma_by_layer=value)


def test_gamma_and_gamma_by_layer_win_over_each_other_from_flag_to_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"gamma_by_layer": [0.9, 0.8]}')
    assert merge({"config": str(file)}).gamma_of(1) == 0.8
    assert merge({"config": str(file), "gamma": 0.7}).gamma_of(1) == 0.7
    file.write_text('{"gamma": 0.9}')
    assert merge({"config": str(file), "gamma_by_layer": "0.6"}).gamma_of(0) == 0.6
    file.write_text('{"gamma": 0.9, "gamma_by_layer": [0.9]}')
    with pytest.raises(OptionsError, match="not both"):
        merge({"config": str(file)})


BY_HEAD = [[0.9, 0.8, 1], [0.7, 0.95, 0.6]]


def test_gamma_by_head_reaches_its_heads_and_survives_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"gamma_by_head": BY_HEAD}))
    options = parse("--sparse-decode", "--sparse-decode-config", str(file))
    assert options is not None
    assert [options.head_gammas(layer, 3) for layer in range(2)] == [(0.9, 0.8, 1), (0.7, 0.95, 0.6)]
    assert options.gamma_of(1) == pytest.approx(0.75)
    assert options.lowest_gamma == 0.6
    assert SparseDecodeOptions.from_mapping(json.loads(options.to_json())) == options
    options.check_layers(2, 3)


@pytest.mark.parametrize("shape", [(3, 3), (1, 3), (2, 2), (3, 2)])
def test_gamma_by_head_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(
        OptionsError, match=r"'gamma_by_head' is for 2 layers of 3 KV heads, but the model has"
    ) as caught:
        SparseDecodeOptions(gamma_by_head=BY_HEAD).check_layers(*shape)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("0.9,0.8", "'gamma_by_head' is '0.9,0.8': give a list for each layer"),
        (0.9, "'gamma_by_head' is 0.9"),
        ({"0": [0.9]}, "'gamma_by_head' is {"),
        ([0.9, 0.8], "has 0.9 for layer 0"),
        ([[0.9], [0]], r"has \[0\] for layer 1"),
        ([[0.9], [1.5]], "for layer 1"),
        ([[0.9], [True]], "for layer 1"),
        ([[0.9], ["0.9"]], "for layer 1"),
        ([[0.9, float("nan")]], "for layer 0"),
        ([[]], r"has \[\] for layer 0"),
        ([[0.9, 0.8], [0.9]], "has 2 gammas for layer 0 and 1 for layer 1"),
    ],
)
def test_wrong_gammas_by_head_are_refused(value: object, what: str) -> None:
    with pytest.raises(OptionsError, match=what) as caught:
        SparseDecodeOptions(gamma_by_head=value)
    assert "\n" not in str(caught.value)


def test_gammas_of_heads_go_with_no_other_gammas_and_no_other_rule(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="gamma_by_layer or gamma_by_head, not both"):
        SparseDecodeOptions(gamma_by_layer=(0.9, 0.8), gamma_by_head=BY_HEAD)
    file = tmp_path / "config.json"
    for other in ('"gamma": 0.9', '"gamma_by_layer": [0.9, 0.8]'):
        file.write_text(f'{{{other}, "gamma_by_head": [[0.9, 0.8], [0.7, 0.6]]}}')
        with pytest.raises(OptionsError, match=r"config\.json: give gamma\S* or gamma_by_head, not both"):
            merge({"config": str(file)})
        with pytest.raises(OptionsError, match="not both"):
            merge(json.loads(file.read_text()))
    for rule in ({"rule": "all"}, {"rule": "top-k", "top_k": 4}):
        with pytest.raises(
            OptionsError, match=f"'gamma_by_head' has no effect with --sparse-decode-rule {rule['rule']}"
        ):
            SparseDecodeOptions(gamma_by_head=BY_HEAD, **rule)


def test_gammas_given_above_win_over_gamma_by_head_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"gamma_by_head": BY_HEAD}))
    config = {"config": str(file)}
    assert merge({**config, "gamma": 0.5}).head_gammas(0, 3) == (0.5,) * 3
    assert merge({**config, "gamma_by_layer": "0.5,0.4"}).head_gammas(1, 3) == (0.4,) * 3
    assert merge({**config, "gamma_by_head": [[0.5, 0.6]]}).head_gammas(0, 2) == (0.5, 0.6)
    for rule in ({"rule": "all"}, {"rule": "top-k", "top_k": 4}):
        assert merge({**config, **rule}).gamma_by_head == ()
    for below in ({"gamma": 0.5}, {"gamma_by_layer": [0.5, 0.4]}):
        file.write_text(json.dumps(below))
        assert merge({**config, "gamma_by_head": BY_HEAD}).head_gammas(1, 3) == (0.7, 0.95, 0.6)


@pytest.mark.parametrize(
    ("in_file", "above"),
    [
        ({"rule": "top-k", "top_k": 64}, {"rule": "coverage"}),
        ({"rule": "top-delta", "delta": 5, "path": "fused"}, {"rule": "coverage"}),
        ({"rule": "top-delta", "delta": 5}, {"rule": "top-k", "top_k": 0.1}),
    ],
)
def test_another_rule_leaves_behind_what_the_file_gives_for_its_own(tmp_path: Path, in_file: dict, above: dict) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**in_file, "sink_tokens": 48}))
    assert merge({"config": str(file), **above}) == SparseDecodeOptions(**above, sink_tokens=48)
    # What is given beside the rule is still told.
    with pytest.raises(OptionsError, match="--sparse-decode-delta has no effect with"):
        merge({"config": str(file), **above, "delta": 4})


def test_a_config_for_another_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model": SHAPE, "page_size": 32}))
    options = merge({"config": str(file)})
    assert options.page_size == 32
    options.check_shape(module.ModelShape(**SHAPE))
    for field, other in (("architecture", "LlamaForCausalLM"), ("layers", 3), ("kv_heads", 1), ("head_dim", 128)):
        with pytest.raises(OptionsError, match="was made for Qwen2ForCausalLM of 2 layers"):
            options.check_shape(module.ModelShape(**{**SHAPE, field: other}))


@pytest.mark.parametrize(
    "model", ["Qwen2", {}, {**SHAPE, "layers": "2"}, {**SHAPE, "more": 1}, {**SHAPE, "layers": True}]
)
def test_a_config_with_a_malformed_model_is_refused(model: object) -> None:
    with pytest.raises(OptionsError, match="config key 'model' is"):
        SparseDecodeOptions(model=model)
