"""What SGLang sees of an offloaded KV cache: how large it is. Its keys and values are not in one place."""

from __future__ import annotations

from typing import Any, NoReturn

from sglang.srt.mem_cache.memory_pool import KVCache

from sglang_sparse.offload.sizing import OffloadSizes
from sglang_sparse.option_values import GIB


class OffloadKVPool(KVCache):
    """Stands where SGLang's pool would; allocators and the radix cache only use its size.

    Whoever reads or writes keys through it would miss the host pool: that raises RuntimeError.
    """

    def __init__(self, size: int, sizes: OffloadSizes, **arguments: Any) -> None:
        super().__init__(size, enable_memory_saver=False, **arguments)
        self.sizes = sizes
        on_gpu = sizes.summary_bytes + sizes.hot_bytes + sizes.open_bytes + sizes.staging_bytes
        self.mem_usage = on_gpu / GIB

    @property
    def pages(self) -> int:
        """Pages of the host pool, the padding page included."""
        return self.size // self.page_size + 1

    def _nowhere(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("keys and values are offloaded: there is no pool of them on the GPU")

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = _nowhere

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of keys and of values in the host pool."""
        return self.sizes.host_bytes // 2, self.sizes.host_bytes // 2
