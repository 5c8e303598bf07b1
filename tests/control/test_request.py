"""`custom_params`: what SGLang cannot carry is refused, what it can is not, and ours are checked by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sparse import cpu
from sglang_sparse.control.request import KEEP_ALL, KEY, check_custom_params, threshold
from sglang_sparse.option_values import OptionsError
from sglang_sparse.options import SparseDecodeOptions

OPTIONS = SparseDecodeOptions()
TOP_K = SparseDecodeOptions(rule="top-k", top_k=0.2)
TOP_DELTA = SparseDecodeOptions(rule="top-delta")

GOOD: list[tuple[Any, float | None]] = [
    (None, None),
    ({}, None),
    ({KEY: {}}, None),
    ({KEY: None}, None),
    ({KEY: {"gamma": 0.98}}, 0.98),
    ({KEY: {"gamma": 1}}, 1.0),
    ({KEY: {"dense": True}}, KEEP_ALL),
    ({KEY: {"dense": False}}, None),
    ({KEY: {"dense": False, "gamma": 0.5}}, 0.5),
    ({"thinking_budget": 5, "ids": [1, 2, None], "more": {"a": 1, "b": "x"}}, None),
]

BAD: list[tuple[Any, str]] = [
    ([1], "custom_params must be an object"),
    ("gamma", "custom_params must be an object"),
    ({KEY: 0.98}, "custom_params.sparse_decode must be an object"),
    ({KEY: [0.98]}, "custom_params.sparse_decode must be an object"),
    ({KEY: {"gamma": 0}}, "custom_params.sparse_decode.gamma is 0:"),
    ({KEY: {"gamma": 1.5}}, "custom_params.sparse_decode.gamma is 1.5:"),
    ({KEY: {"gamma": None}}, "custom_params.sparse_decode.gamma is null:"),
    ({KEY: {"gamma": "high"}}, 'custom_params.sparse_decode.gamma is "high":'),
    ({KEY: {"gamma": True}}, "custom_params.sparse_decode.gamma is true:"),
    ({KEY: {"dense": 1}}, "custom_params.sparse_decode.dense is 1:"),
    ({KEY: {"delta": 3}}, "custom_params.sparse_decode.delta has no effect with --sparse-decode-rule coverage"),
    ({KEY: {"delta": -1}}, "custom_params.sparse_decode.delta is -1:"),
    ({KEY: {"top_k": 3}}, "custom_params.sparse_decode.top_k is unknown: known are gamma, delta, dense"),
    ({KEY: {"dense": True, "gamma": 0.5}}, "custom_params.sparse_decode.gamma has no effect with"),
    ({KEY: {"gamma": {"layer": 1}}}, "custom_params.sparse_decode.gamma is an object:"),
    ({"a": {"b": [1]}}, "custom_params.a.b is a list:"),
    ({"a": [[1]]}, r"custom_params.a\[0\] is a list:"),
    ({"a": [1, {"b": 1}]}, r"custom_params.a\[1\] is an object:"),
    ({"a": 2**64}, "custom_params.a is an integer beyond 64 bits"),
    ({"a": "\ud800"}, "custom_params.a holds a lone surrogate"),
    ({"\ud800": 1}, r"custom_params.\\ud800 holds a lone surrogate"),
    ({1: 1}, "custom_params.1: keys in custom_params must be strings"),
    ({"a": {1: 1}}, "custom_params.a.1: keys in custom_params must be strings"),
    ({"a": b"x"}, "custom_params.a is bytes:"),
]


def test_a_request_has_a_delta_of_its_own() -> None:
    params = {KEY: {"delta": 8}}
    check_custom_params(params, TOP_DELTA)
    assert threshold(params) == 8.0


@pytest.mark.parametrize(("params", "expected"), GOOD, ids=str)
def test_good_params_say_what_the_rule_is_asked_for(params: Any, expected: float | None) -> None:
    check_custom_params(params, OPTIONS)
    assert threshold(params) == expected


@pytest.mark.parametrize(("params", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_params_are_refused_by_field(params: Any, message: str) -> None:
    with pytest.raises(OptionsError, match=message) as caught:
        check_custom_params(params, OPTIONS)
    str(caught.value).encode()


def test_gamma_needs_a_rule_that_aims_at_one() -> None:
    check_custom_params({KEY: {"dense": True}}, TOP_K)
    with pytest.raises(OptionsError, match="has no effect with --sparse-decode-rule top-k"):
        check_custom_params({KEY: {"gamma": 0.9}}, TOP_K)


@pytest.fixture(scope="module")
def survives_sglang() -> Callable[[Any], bool]:
    """Whether SGLang's encoder and its scheduler's decoder carry `custom_params`."""
    cpu.activate()
    import msgspec
    from sglang.srt.sampling.sampling_params import SamplingParams

    decoder = msgspec.msgpack.Decoder(SamplingParams)

    def survives(params: Any) -> bool:
        try:
            return decoder.decode(msgspec.msgpack.encode(SamplingParams(custom_params=params))).custom_params == params
        except (msgspec.ValidationError, TypeError, ValueError, OverflowError):
            return False

    return survives


SCALARS = st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
)


@given(params=st.dictionaries(st.text(max_size=3), VALUES, max_size=3) | VALUES)
def test_exactly_what_sglang_can_carry_is_let_through(params: Any, survives_sglang: Callable[[Any], bool]) -> None:
    try:
        check_custom_params(params, OPTIONS)
        passes = True
    except OptionsError:
        passes = False
    assert passes == survives_sglang(params)
