"""What sparse decode refuses once the pools are there."""

from __future__ import annotations

import pytest
import torch

from sglang_sparse import support
from sglang_sparse.option_values import UnsupportedError


def test_keys_are_kept_in_the_type_of_the_queries() -> None:
    """The kernels multiply one with the other: anything else would end the first decode step."""
    support.check_kv_dtype(torch.float16, torch.float16)
    with pytest.raises(UnsupportedError, match=r"KV cache of torch.bfloat16 with a model of torch.float16: use --kv-c"):
        support.check_kv_dtype(torch.bfloat16, torch.float16)
    with pytest.raises(UnsupportedError, match=r"KV cache of torch.float8_e4m3fn: use --kv-cache-dtype bfloat16"):
        support.check_kv_dtype(torch.float8_e4m3fn, torch.float8_e4m3fn)
