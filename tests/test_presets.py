"""Presets: what they choose, and what wins over them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from sglang_sparse.option_sources import add_flags, merge, pop_flags
from sglang_sparse.options import OptionsError, SparseDecodeOptions


def test_moira() -> None:
    options = merge({"preset": "moira"})
    assert (options.estimator, options.gamma, options.block_size) == ("mean-variance", 0.99, 16)
    assert (options.rule, options.resolved_tail) == ("coverage", "drop")


def test_ffd() -> None:
    options = merge({"preset": "ffd"})
    assert (options.estimator, options.thumbnail_bits, options.rule) == ("ffd", 2, "top-delta")
    assert (options.resolved_tail, options.resolved_delta) == ("drop", 6.0)


def test_ffds_codes_have_two_bits(tmp_path: Path) -> None:
    config = tmp_path / "sparse.json"
    config.write_text(json.dumps({"thumbnail_bits": 4, "gamma": 0.9}))
    for given in (
        {"preset": "ffd", "thumbnail_bits": 4},
        {"estimator": "ffd", "thumbnail_bits": 3},
        {"preset": "ffd", "config": str(config)},
    ):
        with pytest.raises(OptionsError, match=r"ffd does not go with --sparse-decode-thumbnail-bits [34]: use"):
            merge(given)
    # Bits that a file gives for its estimator mean nothing once a flag asks for another.
    assert merge({"estimator": "ffd", "config": str(config)}).thumbnail_bits == 2
    assert merge({"preset": "ffd", "estimator": "thumbnail", "thumbnail_bits": 4}).thumbnail_bits == 4


def test_sparda() -> None:
    """The constants of its code: windows of 32 keys at stride 16, blocks of 64, 64 of them beside one block of sinks
    and a window of 2,048 tokens, dense up to 8,192 tokens."""
    options = merge({"preset": "sparda"})
    assert (options.estimator, options.block_size, options.select_by) == ("strided-mean", 64, "forecast")
    assert (options.rule, options.top_k, options.resolved_tail, options.resolved_forecast) == (
        *("top-k", 96, "drop", "query"),
    )
    assert (options.sink_tokens, options.window_tokens, options.min_context) == (64, 2048, 8192)
    heads = merge({"preset": "sparda", "forecast": "heads.safetensors", "top_k": 0.047})
    assert (heads.resolved_forecast, heads.top_k) == ("heads.safetensors", 0.047)


def test_flags_and_config_win(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    config = tmp_path / "sparse.json"
    config.write_text(json.dumps({"gamma": 0.9, "window_tokens": 64}))
    flags = ["--sparse-decode", "--sparse-decode-preset", "moira", "--sparse-decode-block-size", "32"]
    options = pop_flags(parser.parse_args([*flags, "--sparse-decode-config", str(config)]))
    assert options is not None
    assert (options.gamma, options.window_tokens, options.block_size) == (0.9, 64, 32)
    assert options.estimator == "mean-variance"


def test_no_preset_is_the_default() -> None:
    assert merge({}) == SparseDecodeOptions()


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(OptionsError, match="--sparse-decode-preset is 'quest': choose one of moira, ffd, sparda"):
        merge({"preset": "quest"})
