"""The SGLang plugin: registers flags, hooks and the attention backend. The only user of SGLang's hook registry.

SGLang calls `register` in the process that parses the arguments and in every scheduler process. The first adds the
flags; scheduler processes find the options in the environment and install sparse decode. SGLang logs and swallows
exceptions of plugins and hooks, so each installation step is verified, and a failure stops the process.
"""

from __future__ import annotations

import argparse
import functools
import logging
import pkgutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sglang_sparse import hook_targets, option_sources, rank_support, support
from sglang_sparse import sglang_compat as compat
from sglang_sparse.control.hooks import http_hooks, scheduler_hooks, tokenizer_hooks
from sglang_sparse.dense_graphs import dense_graph_hooks
from sglang_sparse.options import DEFAULT_MAX_REQUESTS, DEFAULT_PAGE_SIZE, OptionsError, SparseDecodeOptions, flag
from sglang_sparse.selection_options import FORECAST

if not compat.is_patched():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
else:
    from sglang_sparse.fork import PointKind as HookType
    from sglang_sparse.fork import Points as HookRegistry

if TYPE_CHECKING:
    from sglang_sparse.backend import SparseDecodeBackend
    from sglang_sparse.observe.metrics import MetricsExporter
    from sglang_sparse.offload.hooks import OffloadHooks
    from sglang_sparse.split.hooks import SplitHooks

logger = logging.getLogger(__name__)

_options: SparseDecodeOptions | None = None
"""Of the process that parsed the arguments."""
_backend: SparseDecodeBackend | None = None
_metrics: MetricsExporter | None = None
_memory_is_reserved = False
_own_pool: OffloadHooks | SplitHooks | None = None
"""Hooks of a KV pool of our own, if the options ask for one."""
_hooked: set[str] = set()
"""Targets at which this process has registered a hook of ours."""


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    if compat.is_patched():
        logger.warning("The plugin sparse_decode does nothing: this SGLang is patched for sparse decode.")
        return
    install()


def install() -> None:
    """Registers what this process needs: the flags, and sparse decode if the environment asks for it."""
    _hook(hook_targets.ADD_CLI_ARGS, _add_cli_args)
    _hook(hook_targets.FROM_CLI_ARGS, _from_cli_args)
    try:
        options = SparseDecodeOptions.from_environment()
        if options is not None and not compat.decodes_nothing():
            _register_in_scheduler(options)
    except Exception as error:
        # SystemExit passes through SGLang's `except Exception`.
        _stop(error)


def engine_kwargs(**kwargs: Any) -> dict[str, Any]:
    """Arguments of `sglang.Engine` for sparse decode, checked.

    Takes the Engine's own arguments and `sparse_decode_<option>` ones (`sparse_decode_gamma=0.95`, see
    SparseDecodeOptions); `sparse_decode_config` names a JSON file. Use as `sglang.Engine(**engine_kwargs(...))`.

    Raises:
        OptionsError: if an option is wrong or does not go together with the other arguments or the model.

    The options reach the Engine's processes through the environment: start the Engine before the next call.
    """
    from sglang.srt.server_args import ServerArgs

    if compat.is_patched():
        from sglang_sparse import fork

        fork.install()
    else:
        from sglang.srt.plugins import load_plugins

        load_plugins()
    _verify_hooks(hook_targets.MAIN_TARGETS)
    prefix = "sparse_decode_"
    given = {key.removeprefix(prefix): kwargs.pop(key) for key in list(kwargs) if key.startswith(prefix)}
    options = option_sources.merge(given)
    kwargs.setdefault("log_level", "error")
    kwargs |= _prepare(options, kwargs)
    server_args = ServerArgs(**kwargs)
    _check_model(options, server_args)
    _install(options, tokenizer_hooks(_current_options))
    options.to_environment()
    return {"server_args": server_args}


# --- process that parses the arguments ---------------------------------------------------------------------------


def _add_cli_args(original: Callable, parser: argparse.ArgumentParser) -> Any:
    result = original(parser)
    option_sources.add_flags(parser, on_enable=lambda: _verify_hooks(hook_targets.MAIN_TARGETS))
    return result


def _from_cli_args(original: Callable, cls: type, namespace: argparse.Namespace) -> Any:
    try:
        options = option_sources.pop_flags(namespace)
        if options is None:
            return original(cls, namespace)
        for name, value in _prepare(options, vars(namespace)).items():
            setattr(namespace, name, value)
        server_args = original(cls, namespace)
        _check_model(options, server_args)
        _install(options, tokenizer_hooks(_current_options) | http_hooks(_current_options))
        if not server_args.enable_metrics:
            compat.explain_missing_metrics()
        options.to_environment()
        return server_args
    except OptionsError as error:
        _stop(error)


def _prepare(options: SparseDecodeOptions, arguments: dict[str, Any]) -> dict[str, Any]:
    """Checks server arguments, of which those at their default do not count; returns what sparse decode sets."""
    compat.check_release(options.allow_untested_sglang, options.own_pool)
    support.check_environment()
    defaults = compat.argument_defaults()
    given = {
        name: value
        for name, value in arguments.items()
        if value is not None and value != defaults.get(name) and not (value is False and defaults.get(name) is None)
    }
    options.check_kv_cache_dtype(given.get("kv_cache_dtype"))
    support.check_arguments({name: value for name, value in given.items() if name in defaults})
    rank_support.check_ranks(given, options)
    _verify_targets(hook_targets.SCHEDULER_TARGETS)
    page_size = given.get("page_size", options.page_size or DEFAULT_PAGE_SIZE)
    options.check_page_size(page_size)
    chosen = {"page_size": page_size, "decode_attention_backend": compat.BACKEND_NAME}
    if options.own_pool:
        if compat.is_patched():
            raise OptionsError(f"{options.own_pool} needs the plugin: a patched SGLang does not have its hooks")
        if "max_running_requests" not in given:
            chosen["max_running_requests"] = DEFAULT_MAX_REQUESTS
        if torch.cuda.is_available():
            # A graph's padding would be stored and attended to.
            chosen["disable_prefill_cuda_graph"] = True
    return chosen


def _install(options: SparseDecodeOptions, hooks: dict[str, Callable]) -> None:
    """Puts hooks of this process in place now: plugins were loaded before it was known that sparse decode is on.

    Raises OptionsError if SGLang lacks a target, or if a hook does not take its place.
    """
    global _options
    _options = options
    _verify_targets(tuple(hooks))
    for target, hook in hooks.items():
        if target not in _hooked:
            _hook(target, hook)
    HookRegistry.apply_hooks()
    _verify_hooks(tuple(hooks))


def _current_options() -> SparseDecodeOptions:
    assert _options is not None
    return _options


def _check_model(options: SparseDecodeOptions, server_args: Any) -> None:
    """Raises OptionsError if the model, or a layer that the options name, rules out sparse decode."""
    compat.resolve(server_args)
    support.check_resolved(server_args)
    support.warn_without_graphs(server_args)
    model_config = compat.model_config(server_args)
    support.check_model(model_config)
    ranks, device = (compat.resolved(server_args, name) for name in ("tp_size", "device"))
    rank_support.check_head_partition(model_config, ranks, device)
    rank_support.warn_untested(ranks, device)
    shape = compat.model_shape(model_config)
    options.check_forecast_file()
    options.check_shape(shape)
    options.check_layers(shape.layers, shape.kv_heads)


# --- scheduler process -------------------------------------------------------------------------------------------


def _register_in_scheduler(options: SparseDecodeOptions) -> None:
    global _own_pool
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_sparse.cpu.paged_allocator import alloc_decode, alloc_extend

    compat.check_release(options.allow_untested_sglang, options.own_pool)
    _verify_targets(hook_targets.SCHEDULER_TARGETS)

    def create_backend(model_runner: Any) -> SparseDecodeBackend:
        return _create_backend(model_runner, options)

    register_attention_backend(compat.BACKEND_NAME)(create_backend)
    _hook(hook_targets.BUILD_BACKEND, _build_backend)
    _hook(hook_targets.CREATE_POOL_CONFIGURATOR, _pool_configurator(options))
    _hook(hook_targets.INTERNAL_STATE, _internal_state)
    _hook(hook_targets.REPORT_DECODE, _report_decode)
    _hook(hook_targets.REPORT_IDLE, _report_idle)
    _hook(hook_targets.ALLOC_EXTEND, alloc_extend)
    _hook(hook_targets.ALLOC_DECODE, alloc_decode)
    for target, scheduler_hook in (scheduler_hooks(lambda: _backend) | dense_graph_hooks(lambda: _backend)).items():
        _hook(target, scheduler_hook)
    if not options.own_pool:
        return
    if options.offload:
        from sglang_sparse.offload.hooks import OffloadHooks

        _own_pool = OffloadHooks(options, _stop)
    else:
        from sglang_sparse.split.hooks import SplitHooks

        _own_pool = SplitHooks(options, _stop)
    _verify_targets(_own_pool.targets)
    for target, pool_hook in _own_pool.by_target().items():
        _hook(target, _where_reserved(pool_hook))


def _where_reserved(hook: Callable) -> Callable:
    """`hook`, in a scheduler whose pool was sized for sparse decode.

    The options stay in the environment after `engine_kwargs`: an Engine without sparse decode may follow in the same
    process.
    """

    @functools.wraps(hook)
    def around(original: Callable, *args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs) if _memory_is_reserved else original(*args, **kwargs)

    return around


def _create_backend(model_runner: Any, options: SparseDecodeOptions) -> SparseDecodeBackend:
    global _backend, _metrics
    from sglang_sparse.backend import SparseDecodeBackend
    from sglang_sparse.observe.metrics import MetricsExporter

    try:
        _verify_hooks(hook_targets.SCHEDULER_TARGETS)
        if not _memory_is_reserved:
            raise OptionsError(
                "memory for page summaries was not reserved: another plugin replaces SGLang's pool sizing"
            )
        if _own_pool is not None:
            _verify_hooks(_own_pool.targets)
        if options.offload:
            from sglang_sparse.offload.backend import OffloadDecodeBackend

            _backend = OffloadDecodeBackend(model_runner, options)
        elif options.own_pool:
            from sglang_sparse.split.backend import SplitDecodeBackend

            _backend = SplitDecodeBackend(model_runner, options)
        else:
            _backend = SparseDecodeBackend(model_runner, options)
        _metrics = MetricsExporter(_backend)
    except OptionsError as error:
        _stop(error)
    except torch.OutOfMemoryError as error:
        _stop(OptionsError(f"no memory for page summaries and step buffers: lower --mem-fraction-static ({error})"))
    except Exception as error:
        logger.exception("sparse decode cannot be installed")
        _stop(error)
    return _backend


def _build_backend(original: Callable, *args: Any, model_runner: Any, backend_str: str, **kwargs: Any) -> Any:
    if _backend is not None and _backend.step.options.own_pool and backend_str != compat.BACKEND_NAME:
        # SGLang's own would read prefixes from a pool on the GPU.
        return _backend.make_prefill(backend_str)
    backend = original(*args, model_runner=model_runner, backend_str=backend_str, **kwargs)
    # SGLang builds the decode backend first, then the prefill backend.
    if _backend is not None and backend is not _backend:
        try:
            support.check_prefill_backend(backend_str)
        except OptionsError as error:
            _stop(error)
        _backend.attach_prefill(backend)
        if _backend.windows:
            # One of its own: the batches that it is told of are not those of prefill.
            windows = original(*args, model_runner=model_runner, backend_str=backend_str, **kwargs)
            _backend.attach_windows(windows)
    return backend


def _pool_configurator(options: SparseDecodeOptions) -> Callable:
    def create(original: Callable, configurator_owner: Any) -> Any:
        global _memory_is_reserved
        from sglang_sparse.memory import reserve

        inner = original(configurator_owner)
        if configurator_owner.server_args.decode_attention_backend != compat.BACKEND_NAME:
            return inner
        try:
            configurator: Any
            layers = support.attention_layers(configurator_owner.model)
            if options.select_by == FORECAST:
                support.check_no_windows(layers, f"{flag('select_by')} {FORECAST}")
            if _own_pool is not None:
                support.check_no_windows(layers, options.own_pool or "")
                configurator = _own_pool.configurator(inner, configurator_owner)
            else:
                shape = compat.cache_shape(configurator_owner)
                configurator = reserve(inner, options, windows=support.window_layers(layers), **shape)
        except Exception as error:
            _stop(error)
        _memory_is_reserved = True
        return configurator

    return create


def _internal_state(original: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(scheduler, *args, **kwargs)
    # Of several ranks the process that asks puts the blocks together.
    if _backend is not None and compat.rank_here()[1] == 1:
        from sglang_sparse.observe.report import server_info

        try:
            block = server_info(_backend, scheduler)
        except Exception as error:
            # An exception here would end the scheduler: a look at the server must not stop it.
            logger.exception("the sparse_decode block of /server_info failed")
            block = {"error": str(error)}
        output.internal_state["sparse_decode"] = block
    return output


def _report_decode(original: Callable, reporter: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(reporter, *args, **kwargs)
    if _metrics is not None:
        _metrics.after_step(reporter)
    if _backend is not None and compat.logs_decode_now(reporter):
        from sglang_sparse.observe.report import log_decode

        log_decode(_backend)
    return result


def _report_idle(original: Callable, reporter: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(reporter, *args, **kwargs)
    if _metrics is not None:
        _metrics.when_idle(reporter)
    return result


# --- hooks ------------------------------------------------------------------------------------------------


def _hook(target: str, hook: Callable) -> None:
    """Registers `hook` around SGLang's function `target`, or around what another plugin has already made of it."""
    if target in HookRegistry._patched:
        # SGLang applies the hooks of a target once, and would leave out in silence those that come later.
        HookRegistry._patched.discard(target)
        HookRegistry._hooks.pop(target, None)
    HookRegistry.register(target, hook, HookType.AROUND)
    _hooked.add(target)


def _verify_targets(targets: tuple[str, ...]) -> None:
    """Raises OptionsError if SGLang has no function at one of the hook targets."""
    for target in targets:
        owner, _, name = target.rpartition(".")
        try:
            found = getattr(pkgutil.resolve_name(owner), name)
        except (ImportError, AttributeError) as error:
            raise OptionsError(f"SGLang has no {target} ({error}): sparse decode cannot be installed") from None
        if not callable(found):
            raise OptionsError(f"SGLang's {target} is not a function: sparse decode cannot be installed")


def _verify_hooks(targets: tuple[str, ...]) -> None:
    """Raises OptionsError unless our hooks on `targets` are in place and reach SGLang's functions."""
    for target in targets:
        owner, _, name = target.rpartition(".")
        found = getattr(pkgutil.resolve_name(owner), name, None)
        # Another plugin's hook alone makes a target patched.
        if target not in _hooked or target not in HookRegistry._patched or not hasattr(found, "__wrapped__"):
            raise OptionsError(f"the hook on {target} was not applied: sparse decode is not installed")


def _stop(error: BaseException) -> NoReturn:
    """Ends the process with one line on stderr and exit code 2."""
    kind = "" if isinstance(error, OptionsError) else f"{type(error).__name__}: "
    print(f"sglang-sparse: error: {kind}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)
