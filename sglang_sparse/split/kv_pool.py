"""What SGLang sees of a split key cache: its size, and the values. Keys are not in one place."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import KVCache

from sglang_sparse.option_values import GIB
from sglang_sparse.split.sizes import SplitShape


class SplitKVPool(KVCache):
    """Holds the values, token by token as SGLang's pool does; keys belong to `SplitDecode`.

    Allocators and the radix cache only use the pool's size. Whoever reads keys or writes through it would miss the
    split ones: that raises RuntimeError.
    """

    def __init__(self, size: int, shape: SplitShape, **arguments: Any) -> None:
        super().__init__(size, enable_memory_saver=False, **arguments)
        self.shape = shape
        g = shape.geometry
        tokens = size + self.page_size
        self.values = [
            torch.zeros((tokens, g.kv_heads, g.head_dim), dtype=self.store_dtype, device=self.device)
            for _ in range(self.layer_num)
        ]
        """Of each layer, `[slots, Hkv, D]`; the padding page comes first."""
        self.mem_usage = sum(self.get_kv_size_bytes()) / GIB

    @property
    def pages(self) -> int:
        """The padding page included."""
        return self.size // self.page_size + 1

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id - self.start_layer]

    def _nowhere(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("keys are split: there is no pool of them")

    get_key_buffer = get_kv_buffer = set_kv_buffer = _nowhere

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of keys and of values of the pool's tokens."""
        tokens = (self.size + self.page_size) * self.shape.heads
        return int(tokens * self.shape.key_bytes), int(tokens * self.shape.value_bytes)
