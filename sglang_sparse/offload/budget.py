"""Sizes of an offloaded server's pools, found where SGLang sizes its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from sglang_sparse import memory
from sglang_sparse.geometry import Geometry
from sglang_sparse.offload.errors import OffloadError
from sglang_sparse.offload.limits import host_limit
from sglang_sparse.offload.sizing import (
    HOST_FLAG,
    HOT_FLAG,
    STAGING_FLAG,
    OffloadShape,
    OffloadSizes,
    check_host_bytes,
    plan_sizes,
)
from sglang_sparse.open_pages import EXTRA_ROWS
from sglang_sparse.option_values import OptionsError, parse_memory
from sglang_sparse.options import FLOAT8_HOST, SparseDecodeOptions
from sglang_sparse.selection import make_estimator
from sglang_sparse.tail import make_tail

DEFAULT_HOST_SHARE = "0.8"
FREE_SHARE = 0.9
"""Of what is free, unless the user says how much: pinned memory cannot be swapped out, and the server still needs some
beside it. Without any left the kernel ends the process."""


class OffloadPoolConfigurator:
    """SGLang's KV pool configurator, which hands out the tokens of a host pool.

    Args:
        inner: the configurator SGLang chose.
        context: tokens of the longest request.
        max_pages: pages that tables have room for.
        max_requests: requests that may run at once.
        hidden_size: width of the model.
        device: where the steps run.
        on_error: called if what was asked for cannot be had; SGLang would print a traceback.
    """

    def __init__(
        self,
        inner: Any,
        options: SparseDecodeOptions,
        *,
        geometry: Geometry,
        layers: int,
        context: int,
        max_pages: int,
        max_requests: int,
        hidden_size: int = 0,
        device: torch.device | str = "cpu",
        on_error: Callable[[BaseException], NoReturn],
    ) -> None:
        self._inner = inner
        self._on_error = on_error
        self._options = options
        tail = make_tail(options, geometry)
        summary = make_estimator(options, geometry).summary_bytes() + (tail.summary_bytes() if tail else 0)
        self._shape = OffloadShape(
            geometry, layers, summary, max_requests + EXTRA_ROWS, options.host_dtype == FLOAT8_HOST
        )
        self._step_bytes = memory.step_buffer_bytes(
            options,
            geometry,
            layers=layers,
            max_pages=max_pages,
            max_requests=max_requests,
            hidden_size=hidden_size,
            device=device,
        )
        self._context = context
        self.sizes: OffloadSizes | None = None
        self._given: dict[str, Any] = {}

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> Any:
        """As many tokens as host memory and the GPU's budget allow."""
        try:
            return self._from_budget(available_bytes)
        except OptionsError as error:
            self._on_error(error)

    def _from_budget(self, available_bytes: int) -> Any:
        options, limit = self._options, host_limit()
        host = parse_memory(options.host_memory or DEFAULT_HOST_SHARE, HOST_FLAG, limit.limit, limit.name)
        if options.host_memory is None:
            host = min(host, int(FREE_SHARE * limit.available))
        check_host_bytes(host, limit)
        gpu = max(0, available_bytes - self._step_bytes)
        hot = None if options.hot_cache is None else parse_memory(options.hot_cache, HOT_FLAG, gpu, "the KV budget")
        staging = options.staging or self._context
        if staging < self._context:
            raise OffloadError(
                f"{STAGING_FLAG} is {staging}, but a prefix may have up to {self._context} tokens: give as many, or "
                "lower --context-length"
            )
        self._given = {
            "gpu_bytes": gpu,
            "staging_tokens": staging,
            "hot_bytes": hot,
            "shares": options.slot_shares or None,
        }
        return self._plan(host)

    def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> Any:
        """Fewer tokens than memory would allow, as `--max-total-tokens` asks."""
        pages = max_total_num_tokens // page_size + 1
        try:
            return self._plan(pages * self._shape.host_page_bytes)
        except OptionsError as error:
            self._on_error(error)

    def _plan(self, host_bytes: int) -> Any:
        self.sizes = plan_sizes(self._shape, host_bytes=host_bytes, **self._given)
        return self._inner.calculate_pool_sizes_from_max_tokens(self.sizes.tokens, self.sizes.page_size)

    def sizes_for(self, tokens: int) -> OffloadSizes:
        """The sizes of a pool that was cut to `tokens` after all."""
        assert self.sizes is not None
        pages = tokens // self.sizes.page_size + 1
        return replace(self.sizes, host_pages=pages, host_bytes=pages * self._shape.host_page_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
