"""The pool that SGLang is given: it has a size and values, and no keys."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from sglang_sparse import hook_targets
from sglang_sparse import sglang_compat as compat
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.split.hooks import SplitHooks
from sglang_sparse.split.sizes import SplitShape

OPTIONS = SparseDecodeOptions(kv_format="split")
GEOMETRY = Geometry(kv_heads=2, group_size=2, head_dim=64, dtype=torch.bfloat16, page_size=32, block_size=16)


def stop(error: BaseException) -> NoReturn:
    raise error


def test_values_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {"page_size": 32, "dtype": torch.bfloat16, "layer_num": 3, "device": "cpu"}
    monkeypatch.setattr(compat, "cache_shape", lambda owner: {"geometry": GEOMETRY, "layers": 3})
    monkeypatch.setattr(compat, "pool_arguments", lambda owner: arguments)
    build = SplitHooks(OPTIONS, stop).by_target()[hook_targets.BUILD_KV_POOL]
    pool = build(None, None, max_total_num_tokens=320, mha_pool_class=None)
    assert pool.pages == 11
    assert [pool.get_value_buffer(layer).shape for layer in range(3)] == [(352, 2, 64)] * 3
    shape = SplitShape.of(OPTIONS, GEOMETRY, 3)
    assert pool.get_kv_size_bytes() == (352 * 6 * shape.key_bytes, sum(each.nbytes for each in pool.values))
    for read in (pool.get_key_buffer, pool.get_kv_buffer, pool.set_kv_buffer):
        with pytest.raises(RuntimeError, match="keys are split: there is no pool of them"):
            read(0)
