"""Options of offload: what goes together, and what they become."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from sglang_sparse.option_sources import add_flags, pop_flags
from sglang_sparse.options import OptionsError, SparseDecodeOptions


def parse(*flags: str) -> SparseDecodeOptions | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return pop_flags(parser.parse_args(["--sparse-decode", *flags]))


def test_flags_and_transport() -> None:
    options = parse(
        *("--sparse-decode-offload", "--sparse-decode-host-memory", "96", "--sparse-decode-hot-cache", "0.3"),
        *("--sparse-decode-staging", "40000", "--sparse-decode-host-dtype", "fp8_e4m3"),
    )
    assert options is not None
    assert (options.offload, options.host_memory, options.hot_cache, options.staging) == (True, "96", "0.3", 40000)
    assert options.host_dtype == "fp8_e4m3"
    assert SparseDecodeOptions.from_mapping(json.loads(options.to_json())) == options
    # JSON and Python may give numbers.
    assert SparseDecodeOptions(offload=True, host_memory=96).host_memory == "96"  # type: ignore[arg-type]


def test_the_audit_is_off_unless_asked_for() -> None:
    assert SparseDecodeOptions(offload=True).audit_rate == 0
    assert SparseDecodeOptions().audit_rate == 0.001


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "all"}, "--sparse-decode-offload: --sparse-decode-rule all reads keys"),
        ({"rule": "top-delta"}, "--sparse-decode-rule top-delta reads keys of the GPU's pool: use coverage or top-k"),
        ({"dense_layers": (1,)}, "--sparse-decode-dense-layers reads keys"),
        ({"estimator": "exact"}, "--sparse-decode-estimator exact reads keys of the GPU's pool: use thumbnail"),
        ({"audit_rate": 0.1}, "--sparse-decode-audit-rate reads keys of the GPU's pool: use 0"),
        ({"offload": "yes"}, "--sparse-decode-offload is 'yes': give true or false"),
        ({"offload": False, "staging": 5}, "--sparse-decode-staging has no effect without --sparse-decode-offload"),
        ({"host_dtype": "fp8"}, "--sparse-decode-host-dtype is 'fp8': choose one of model, fp8_e4m3"),
        (
            {"offload": False, "host_dtype": "fp8_e4m3"},
            "--sparse-decode-host-dtype has no effect without --sparse-decode-offload",
        ),
        ({"staging": 0}, "--sparse-decode-staging is 0: give a whole number from 1"),
        ({"hot_cache": "-3"}, "--sparse-decode-hot-cache is '-3': give GiB, such as 96, or a share"),
        ({"slot_shares": ["a"]}, "config key 'slot_shares' is"),
        ({"slot_shares": 5}, "config key 'slot_shares' is 5: give a number of 0 or more for each layer"),
        ({"slot_shares": [1, -1]}, r"config key 'slot_shares' is \[1, -1\]: give a number of 0"),
        ({"slot_shares": [float("inf"), 1]}, r"config key 'slot_shares' is \[inf, 1\]: give a number of 0"),
        ({"slot_shares": [0, 0]}, "config key 'slot_shares' has no share above 0"),
        ({"gamma": 1.0}, "--sparse-decode-gamma 1 reads keys of the GPU's pool: use a share below 1"),
        ({"gamma_by_layer": (1, 1)}, "--sparse-decode-gamma-by-layer 1 reads keys"),
        ({"offload": False, "slot_shares": [1]}, "config key 'slot_shares' has no effect without"),
    ],
)
def test_wrong_values_name_the_flag(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        SparseDecodeOptions(**{"offload": True, **change})


def test_shares_have_to_fit_the_model() -> None:
    options = SparseDecodeOptions(offload=True, slot_shares=[3, 1])
    options.check_layers(2, 8)
    with pytest.raises(OptionsError, match="config key 'slot_shares' has 2 shares, but the model has 3 layers"):
        options.check_layers(3, 8)
