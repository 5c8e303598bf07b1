"""What the split key cache does in SGLang's scheduler process, by hook target: `plugin` puts it in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from sglang_sparse import hook_targets
from sglang_sparse import sglang_compat as compat
from sglang_sparse.memory import SparsePoolConfigurator
from sglang_sparse.option_values import GIB, OptionsError, flag
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.split.sizes import SplitShape, reserved_bytes


class SplitPoolConfigurator(SparsePoolConfigurator):
    """SGLang's KV pool configurator, told of the memory in which tokens of split keys leave room for as many.

    Args:
        reserved_bytes: memory that does not grow with the pool.
        on_error: called with an OptionsError if that leaves none for tokens.
    """

    def __init__(
        self, inner: Any, shape: SplitShape, reserved_bytes: int, on_error: Callable[[BaseException], NoReturn]
    ) -> None:
        super().__init__(inner, shape.token_share - 1, reserved_bytes)
        self._on_error = on_error

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> Any:
        if self._reserved_bytes >= available_bytes:
            self._on_error(
                OptionsError(
                    f"{flag('kv_format')} split takes {self._reserved_bytes / GIB:.2f} GiB for step buffers, open "
                    f"pages and a prefix in prefill, but the KV budget is {available_bytes / GIB:.2f} GiB: lower "
                    "--max-running-requests or --context-length"
                )
            )
        return super().calculate_pool_sizes(available_bytes, page_size)


class SplitHooks:
    """The hooks of one scheduler process.

    Args:
        stop: ends the process with one line.
    """

    targets = hook_targets.SPLIT_HOOKS

    def __init__(self, options: SparseDecodeOptions, stop: Callable[[BaseException], NoReturn]) -> None:
        self._options = options
        self._stop = stop

    def by_target(self) -> dict[str, Callable]:
        """Functions that go around those of `targets`."""

        def build_kv_pool(original: Callable, owner: Any, *, max_total_num_tokens: int, **_: Any) -> Any:
            from sglang_sparse.split.kv_pool import SplitKVPool

            given = compat.cache_shape(owner)
            shape = SplitShape.of(self._options, given["geometry"], given["layers"])
            try:
                return SplitKVPool(max_total_num_tokens, shape, **compat.pool_arguments(owner))
            except torch.OutOfMemoryError as error:
                self._stop(
                    OptionsError(
                        f"no memory for the values of {max_total_num_tokens} tokens beside split keys: lower "
                        f"--mem-fraction-static ({error})"
                    )
                )

        return {
            hook_targets.BUILD_KV_POOL: build_kv_pool,
            hook_targets.ADD_CHUNKED_REQUEST: compat.add_chunk_of_whole_pages,
        }

    def configurator(self, inner: Any, owner: Any) -> SplitPoolConfigurator:
        """In place of SGLang's."""
        given = compat.cache_shape(owner)
        shape = SplitShape.of(self._options, given["geometry"], given["layers"])
        reserved = reserved_bytes(
            shape,
            self._options,
            context=compat.context_tokens(owner),
            max_pages=given["max_pages"],
            max_requests=given["max_requests"],
            device=given["device"],
        )
        return SplitPoolConfigurator(inner, shape, reserved, self._stop)
