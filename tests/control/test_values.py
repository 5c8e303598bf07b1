"""What POST /sparse_decode takes: known keys, values in range, and only what the server can change."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_sparse.control.values import CHANGES, check_changes
from sglang_sparse.option_values import OptionsError
from sglang_sparse.options import SparseDecodeOptions

GOOD = [
    {"enabled": False},
    {"gamma": 0.9},
    {"gamma": 1},
    {"gamma": None},
    {"audit_rate": 0},
    {"audit_rate": 1},
    {"delta": None},
    {"enabled": True, "gamma": 0.25, "audit_rate": 0.5},
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "nothing to change: give one of enabled, gamma, delta, audit_rate"),
    ({"delta": 3}, "delta has no effect with --sparse-decode-rule coverage"),
    ({"delta": 0}, "delta is 0: give a number of nats above 0"),
    ({"delta": float("nan")}, "delta is NaN:"),
    ({"delta": float("inf")}, "delta is Infinity:"),
    ({"delta": True}, "delta is true:"),
    ({"top_k": 3}, 'unknown key "top_k"'),
    ({"gamma": 0.9, "Gamma": 0.9}, 'unknown key "Gamma"'),
    ({"gamma": 0}, "gamma is 0:"),
    ({"gamma": 1.01}, "gamma is 1.01:"),
    ({"gamma": float("nan")}, "gamma is NaN:"),
    ({"gamma": True}, "gamma is true:"),
    ({"gamma": "0.9"}, 'gamma is "0.9":'),
    ({"gamma": [0.9]}, r"gamma is \[0.9\]:"),
    ({"enabled": 1}, "enabled is 1: give true or false"),
    ({"enabled": None}, "enabled is null:"),
    ({"audit_rate": -0.1}, "audit_rate is -0.1:"),
    ({"audit_rate": 2}, "audit_rate is 2:"),
    ({"audit_rate": None}, "audit_rate is null:"),
    ({"gamma": "x" * 1000}, r'gamma is "x+\.\.\.:'),
]


@pytest.mark.parametrize("body", GOOD, ids=str)
def test_changes_in_range_are_taken(body: dict[str, Any]) -> None:
    assert check_changes(body, SparseDecodeOptions()) == body


def test_delta_goes_with_its_rule() -> None:
    assert check_changes({"delta": 3}, SparseDecodeOptions(rule="top-delta")) == {"delta": 3.0}


@pytest.mark.parametrize("delta", [1e300, 10**400, 2**31], ids=["float64", "integer", "over the largest"])
def test_a_delta_that_the_device_cannot_hold_is_refused(delta: float) -> None:
    """It would end the scheduler when it takes effect."""
    with pytest.raises(OptionsError, match=r"delta is 1?[0-9].*: give a number of nats above 0"):
        check_changes({"delta": delta}, SparseDecodeOptions(rule="top-delta"))


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
def test_others_are_refused_by_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message) as caught:
        check_changes(body, SparseDecodeOptions())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "body", "message"),
    [
        ({"rule": "top-k", "top_k": 0.2}, {"gamma": 0.9}, "no effect with --sparse-decode-rule top-k"),
        ({"rule": "all"}, {"gamma": 0.9}, "no effect with --sparse-decode-rule all"),
        ({"rule": "top-delta"}, {"gamma": 0.9}, "no effect with --sparse-decode-rule top-delta"),
        ({"gamma": 1}, {"gamma": 0.9}, "server started with --sparse-decode-gamma 1"),
        ({"gamma_by_layer": (1, 1)}, {"gamma": 0.9}, "server started with --sparse-decode-gamma-by-layer 1"),
        ({"audit_rate": 0}, {"audit_rate": 0.1}, "server started with --sparse-decode-audit-rate 0"),
    ],
)
def test_what_this_server_cannot_change_is_refused(options: dict, body: dict, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        check_changes(body, SparseDecodeOptions(**options))


def test_a_server_of_any_rule_can_be_switched_off() -> None:
    for options in ({"rule": "top-k", "top_k": 4}, {"rule": "all"}, {"gamma": 1, "audit_rate": 0}):
        body = {"enabled": False, "audit_rate": 0}
        assert check_changes(body, SparseDecodeOptions(**options)) == body


def test_every_change_is_a_setting_of_the_state() -> None:
    import torch

    from sglang_sparse.control.state import DecodeControl

    control = DecodeControl(SparseDecodeOptions(), torch.ones(1, 1, 1))
    assert set(control.report()) == set(CHANGES)
