"""What split keys take, and the tokens that SGLang is given for it."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from sglang_sparse import memory
from sglang_sparse.geometry import Geometry
from sglang_sparse.open_pages import EXTRA_ROWS
from sglang_sparse.options import OptionsError, SparseDecodeOptions
from sglang_sparse.split.decode import SplitDecode
from sglang_sparse.split.hooks import SplitPoolConfigurator
from sglang_sparse.split.prefill import SplitPrefill
from sglang_sparse.split.sizes import SplitShape, reserved_bytes

OPTIONS = SparseDecodeOptions(kv_format="split")


def geometry(page_size: int = 64, dtype: torch.dtype = torch.bfloat16) -> Geometry:
    return Geometry(kv_heads=8, group_size=4, head_dim=128, dtype=dtype, page_size=page_size, block_size=16)


@pytest.mark.parametrize(("page_size", "saving"), [(16, 0.125), (32, 0.15625), (64, 0.171875), (128, 0.1796875)])
def test_saving_by_page_size(page_size: int, saving: float) -> None:
    shape = SplitShape.of(OPTIONS, geometry(page_size), 32)
    assert shape.key_bytes == 128 * (1 + 0.25 + 4 / page_size)
    assert shape.saving == saving


def test_sizes_are_those_of_the_tensors() -> None:
    g = Geometry(kv_heads=2, group_size=2, head_dim=64, dtype=torch.float32, page_size=32, block_size=16)
    pages, rows, layers = 7, 5, 3
    values = [torch.zeros(pages * 32, 2, 64) for _ in range(layers)]
    sizes: dict[str, Any] = {"max_requests": rows, "max_pages": 16, "device": "cpu"}
    split = SplitDecode(OPTIONS, g, values=values, rows=rows, **sizes)
    shape = SplitShape.of(OPTIONS, g, layers)
    tokens = pages * 32 * layers * 2
    assert split.summaries.bytes == tokens * (shape.key_bytes + shape.tail_bytes)
    assert sum(each.nbytes for each in values) == tokens * shape.value_bytes
    assert split.open_keys.nbytes == shape.open_bytes(rows)
    assert SplitPrefill(split, staging_tokens=100)._staging.nbytes == shape.staging_bytes(100)
    step = memory.step_buffer_bytes(OPTIONS, g, layers=layers, max_pages=16, max_requests=rows)
    rest = shape.open_bytes(rows + EXTRA_ROWS) + shape.staging_bytes(100) + rows * 16 * 4
    assert reserved_bytes(shape, OPTIONS, context=100, max_pages=16, max_requests=rows) == step + rest


class Inner:
    """Tokens of keys and values as they are."""

    def __init__(self, token_bytes: int) -> None:
        self.token_bytes = token_bytes

    def calculate_pool_sizes(self, available: int, page_size: int) -> int:
        return available // self.token_bytes


def stop(error: BaseException) -> NoReturn:
    raise error


def test_tokens_grow_by_the_saving() -> None:
    """Beside a cache in bf16 with the same summaries, of which the codes are a part of the keys here."""
    g, layers, available, reserved = geometry(), 32, 40 << 30, 1 << 30
    shape = SplitShape.of(OPTIONS, g, layers)
    inner = Inner(shape.heads * g.kv_bytes)
    tokens = SplitPoolConfigurator(inner, shape, reserved, stop).calculate_pool_sizes(available, 64)
    needed = tokens * shape.heads * (shape.value_bytes + shape.key_bytes + shape.tail_bytes)
    assert 0.999 * (available - reserved) < needed <= available - reserved
    plain = SparseDecodeOptions(thumbnail_bits=2)
    beside = memory.reserve(inner, plain, geometry=g, layers=layers, max_pages=16, max_requests=2)
    fewer = beside.calculate_pool_sizes(available - reserved + beside._reserved_bytes, 64)
    # 512 + 40 + 4 bytes a token, layer and head against 256 + 168 + 4.
    assert tokens / fewer == pytest.approx(556 / 428, rel=1e-3)
    # More than SGLang's own would hold of the same memory, although summaries are part of it.
    assert tokens / ((available - reserved) // inner.token_bytes) == pytest.approx(512 / 428, rel=1e-3)


def test_a_budget_without_room_for_tokens_is_refused() -> None:
    shape = SplitShape.of(OPTIONS, geometry(), 32)
    made = SplitPoolConfigurator(Inner(1), shape, 3 << 30, stop)
    with pytest.raises(OptionsError, match=r"kv-format split takes 3.00 GiB for step .* KV budget is 2.00 GiB: lower"):
        made.calculate_pool_sizes(2 << 30, 64)
