"""Options of the split key cache: what goes together, and what they become."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from sglang_sparse.option_sources import add_flags, pop_flags
from sglang_sparse.options import OptionsError, SparseDecodeOptions


def test_flag_transport_and_what_it_sets() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    options = pop_flags(parser.parse_args(["--sparse-decode", "--sparse-decode-kv-format", "split"]))
    assert options is not None
    assert (options.kv_format, options.thumbnail_bits, options.audit_rate) == ("split", 2, 0)
    assert options.own_pool == "--sparse-decode-kv-format split"
    assert SparseDecodeOptions.from_mapping(json.loads(options.to_json())) == options
    plain = SparseDecodeOptions()
    assert (plain.kv_format, plain.thumbnail_bits, plain.own_pool) == ("model", 4, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_format": "int4"}, "--sparse-decode-kv-format is 'int4': choose one of model, split"),
        ({"offload": True}, "--sparse-decode-kv-format split does not go with --sparse-decode-offload"),
        (
            {"rule": "top-delta", "path": "fused"},
            "split does not go with --sparse-decode-path fused, which reads keys as",
        ),
        ({"estimator": "exact"}, "split does not go with --sparse-decode-estimator exact: use"),
        ({"estimator": "minmax"}, "split does not go with --sparse-decode-estimator minmax: use"),
        ({"thumbnail_bits": 3}, "split does not go with --sparse-decode-thumbnail-bits 3: use"),
        ({"audit_rate": 0.1}, "split does not go with --sparse-decode-audit-rate 0.1, for which exact keys are read"),
    ],
)
def test_wrong_values_name_the_flag(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        SparseDecodeOptions(**{"kv_format": "split", **change})


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "fp8_e4m3", "fp4_e2m1"])
def test_quantised_caches_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(OptionsError, match=f"kv-format split does not go with --kv-cache-dtype {dtype}: it quantises"):
        SparseDecodeOptions(kv_format="split").check_kv_cache_dtype(dtype)
    SparseDecodeOptions(kv_format="split").check_kv_cache_dtype("bfloat16")
    SparseDecodeOptions().check_kv_cache_dtype(dtype)
