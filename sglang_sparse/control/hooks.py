"""Hooks on SGLang for control at run time and by request. `plugin` registers them; each wraps the function it names."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_sparse import hook_targets
from sglang_sparse import sglang_compat as compat
from sglang_sparse.control import answers, request
from sglang_sparse.control.accounting import StepCounts, publish
from sglang_sparse.options import SparseDecodeOptions

if TYPE_CHECKING:
    from sglang_sparse.backend import SparseDecodeBackend

logger = logging.getLogger(__name__)

_COUNTS = "sparse_decode_counts"


def tokenizer_hooks(options_of: Callable[[], SparseDecodeOptions]) -> dict[str, Callable]:
    """Hooks, by target, of the process that receives requests: their `custom_params` and what their answers say.

    `options_of` gives what the server was started with; a process may start several Engines one after the other.
    """

    def init_communicators(original: Callable, manager: Any, *args: Any, **kwargs: Any) -> None:
        from sglang_sparse.control import messages

        original(manager, *args, **kwargs)
        messages.register_types()
        messages.connect_tokenizer(manager)

    def create_tokenized(original: Callable, manager: Any, *args: Any, **kwargs: Any) -> Any:
        tokenized = original(manager, *args, **kwargs)
        request.check_custom_params(getattr(tokenized.sampling_params, "custom_params", None), options_of())
        return tokenized

    return {
        hook_targets.INIT_COMMUNICATORS: init_communicators,
        hook_targets.CREATE_TOKENIZED: create_tokenized,
        hook_targets.GENERATE_REQUEST: answers.generate,
    }


def http_hooks(options_of: Callable[[], SparseDecodeOptions]) -> dict[str, Callable]:
    """Hooks, by target, of the process that serves HTTP."""

    def run_http_server(original: Callable, server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang_sparse.control import http, messages

        app, options = compat.http_app(), options_of()
        http.add_routes(app, options, functools.partial(messages.exchange, tokenizer_manager))
        http.check_before_streams(app, "/generate", options)
        return original(server_args, tokenizer_manager, *args, **kwargs)

    return {
        hook_targets.RUN_HTTP_SERVER: run_http_server,
        hook_targets.CHAT_STREAM: answers.stream,
        hook_targets.COMPLETION_STREAM: answers.stream,
        hook_targets.COMPLETION_ANSWER: answers.complete,
    }


def scheduler_hooks(backend_of: Callable[[], SparseDecodeBackend | None]) -> dict[str, Callable]:
    """Hooks, by target, of the scheduler process; `backend_of` gives its backend once there is one."""

    def init_dispatcher(original: Callable, scheduler: Any) -> None:
        from sglang_sparse.control import messages
        from sglang_sparse.observe.ranks import RankState
        from sglang_sparse.observe.report import live_state

        def answer(changes: dict[str, Any]) -> RankState:
            backend = backend_of()
            if backend is None:
                raise RuntimeError("this scheduler does not decode sparsely")
            if changes:
                backend.step.control.change(changes)
                logger.info("Sparse decode settings from the next step on: %s.", backend.step.control.report())
            return RankState(backend.step.geometry.model_heads, live_state(backend, scheduler))

        original(scheduler)
        # The first call once the scheduler knows the size of its pool.
        compat.refuse_prompts_without_room(scheduler)
        messages.register_types()
        messages.connect_scheduler(scheduler, answer)

    def run_batch(original: Callable, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        backend = backend_of()
        if backend is None or not batch.forward_mode.is_decode():
            return original(scheduler, batch, *args, **kwargs)
        backend.step.control.announce(
            [request.threshold(req.sampling_params.custom_params) for req in batch.reqs],
            longest=max(map(compat.most_tokens, batch.reqs), default=None),
        )
        requests = len(batch.reqs)
        result = original(scheduler, batch, *args, **kwargs)
        totals = backend.step.buffers.request_totals
        setattr(result, _COUNTS, StepCounts.copy(totals, requests, compat.forward_stream(scheduler)))
        return result

    def process_decode(original: Callable, processor: Any, batch: Any, result: Any) -> Any:
        counts = getattr(result, _COUNTS, None)
        if counts is not None:
            counts.add_to(batch.reqs)
        return original(processor, batch, result)

    def collect_info(original: Callable, processor: Any, i: int, req: Any, logits_output: Any) -> Any:
        result = original(processor, i, req, logits_output)
        if req.finished():
            publish(req, compat.rank_here()[1])
        return result

    return {
        hook_targets.INIT_DISPATCHER: init_dispatcher,
        hook_targets.RUN_BATCH: run_batch,
        hook_targets.PROCESS_DECODE: process_decode,
        hook_targets.COLLECT_INFO: collect_info,
    }
