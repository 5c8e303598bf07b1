"""A dense server of a process that started a sparse one before: the options are still in the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import skip_unless_served

from sglang_sparse import SparseDecodeOptions
from sglang_sparse.options import ENVIRONMENT_VARIABLE

pytestmark = pytest.mark.server


def test_it_is_dense(start_server: Any, random_llama: Path) -> None:
    """With the options of offload, whose hooks would give it another KV pool."""
    # The process that started the sparse one would have been refused.
    skip_unless_served(["--sparse-decode-offload"])
    text = SparseDecodeOptions(offload=True, host_memory="0.2").to_json()
    server = start_server(random_llama, **{ENVIRONMENT_VARIABLE: text})
    answer = server.generate(list(range(200)), 4)
    assert len(answer["output_ids"]) == 4
    assert "sparse_decode" not in answer["meta_info"]
