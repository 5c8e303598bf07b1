"""What offload does in SGLang's scheduler process, by hook target: `plugin` puts it in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from sglang_sparse import hook_targets
from sglang_sparse import sglang_compat as compat
from sglang_sparse.offload.budget import OffloadPoolConfigurator
from sglang_sparse.options import OptionsError, SparseDecodeOptions


class OffloadHooks:
    """The hooks of one scheduler process and what they share: the sizes of its pools.

    Args:
        stop: ends the process with one line.
    """

    targets = hook_targets.OFFLOAD_HOOKS

    def __init__(self, options: SparseDecodeOptions, stop: Callable[[BaseException], NoReturn]) -> None:
        self._options = options
        self._stop = stop
        self._pools: OffloadPoolConfigurator | None = None

    def by_target(self) -> dict[str, Callable]:
        """Functions that go around those of `targets`."""

        def build_kv_pool(original: Callable, owner: Any, *, max_total_num_tokens: int, **_: Any) -> Any:
            return self._build_kv_pool(owner, max_total_num_tokens)

        def add_one_request(original: Callable, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
            refused = self._refuse(adder, req)
            return original(adder, req, *args, **kwargs) if refused is None else refused

        return {
            hook_targets.BUILD_KV_POOL: build_kv_pool,
            hook_targets.ADD_ONE_REQUEST: add_one_request,
            hook_targets.ADD_CHUNKED_REQUEST: compat.add_chunk_of_whole_pages,
        }

    def configurator(self, inner: Any, owner: Any) -> OffloadPoolConfigurator:
        """SGLang asks for a configurator several times: it gets the one that knows the sizes."""
        if self._pools is None:
            self._pools = OffloadPoolConfigurator(
                inner,
                self._options,
                context=compat.context_tokens(owner),
                on_error=self._stop,
                **compat.cache_shape(owner),
            )
        return self._pools

    def _build_kv_pool(self, owner: Any, tokens: int) -> Any:
        from sglang_sparse.offload.kv_pool import OffloadKVPool

        if self._pools is None:
            self._stop(OptionsError("offload has no sizes: another plugin replaces SGLang's pool sizing"))
        return OffloadKVPool(tokens, self._pools.sizes_for(tokens), **compat.pool_arguments(owner))

    def _refuse(self, adder: Any, req: Any) -> Any:
        """SGLang's answer for a request whose prefix does not fit the staging beside those of its batch; else None."""
        assert self._pools is not None
        assert self._pools.sizes is not None
        tokens = sum(len(each.prefix_indices) for each in [*adder.can_run_list, req])
        if adder.can_run_list and tokens > self._pools.sizes.staging_tokens:
            return compat.cannot_add_now()
        return None
