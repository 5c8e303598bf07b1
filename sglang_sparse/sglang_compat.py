"""What depends on the SGLang release.

No other module knows release numbers or reaches for names that moved between releases. Since 0.5.20 server arguments
are sealed records: what SGLang resolves is declared beside them, and one asks for it by name.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_sparse.geometry import Geometry, heads_of_rank, table_pages
from sglang_sparse.option_values import UnsupportedError
from sglang_sparse.options import ModelShape, SparseDecodeOptions
from sglang_sparse.options import flag as option_flag

logger = logging.getLogger(__name__)

BACKEND_NAME = "sparse_decode"
TESTED_RELEASES = ("0.5.17", "0.5.20", "0.5.23")
OWN_POOL_RELEASES = ("0.5.17",)
"""With a KV pool of our own: offload and split keys."""
MODEL_RELEASES = ("0.5.17",)
"""With all architectures and with LoRA; the others have been tested with a few architectures."""
TENSOR_PARALLEL_RELEASES = ("0.5.17",)
"""On more ranks than one."""

POINTS_MODULE = "sglang.srt.sparse_decode_points"
"""An SGLang that is patched for sparse decode (patches/) has this module, and imports it."""


def is_patched() -> bool:
    """Whether SGLang calls sparse decode by itself, so that there is nothing to hook."""
    try:
        if importlib.util.find_spec(POINTS_MODULE) is None:
            return False
        arguments = importlib.util.find_spec("sglang.srt.server_args")
    except ModuleNotFoundError:
        return False
    # pip does not know the module: it stays where another release was installed over a patched one.
    return arguments is not None and POINTS_MODULE in Path(arguments.origin or "").read_text(encoding="utf-8")


def has_tested_models() -> bool:
    """Whether all architectures count as tested on the installed SGLang: not so on releases where a few were."""
    release = importlib.metadata.version("sglang").split("+")[0]
    # Those that are not tested at all have been allowed by a flag.
    return release in MODEL_RELEASES or release not in TESTED_RELEASES


def decodes_nothing() -> bool:
    """Whether this is a process of SGLang without a model: some of them load plugins too, since 0.5.23."""
    from setproctitle import getproctitle

    return getproctitle().startswith(("sglang::detokenizer", "sglang::data_parallel_controller"))


def check_release(allow_untested: bool = False, own_pool: str | None = None) -> None:
    """Raises UnsupportedError unless the installed SGLang release has been tested, or `allow_untested`.

    `own_pool` is what users call the option that asks for a KV pool of our own, if one does.
    """
    release = importlib.metadata.version("sglang")
    tested = OWN_POOL_RELEASES if own_pool else TESTED_RELEASES
    if release.split("+")[0] in tested:
        return
    if not allow_untested:
        what = own_pool or "--sparse-decode"
        raise UnsupportedError(
            f"SGLang {release} has not been tested with {what}: install one of {', '.join(tested)}, "
            f"or add {option_flag('allow_untested_sglang')}"
        )
    logger.warning("SGLang %s has not been tested with sparse decode (tested: %s).", release, ", ".join(tested))


# --- server arguments ----------------------------------------------------------------------------------------------


def argument_defaults() -> dict[str, Any]:
    """Default values of SGLang's server arguments, by field name."""
    from sglang.srt.server_args import ServerArgs

    if dataclasses.is_dataclass(ServerArgs):
        fields: Iterable[Any] = dataclasses.fields(ServerArgs)
        missing: Any = dataclasses.MISSING
    else:
        import msgspec

        fields, missing = msgspec.structs.fields(ServerArgs), msgspec.NODEFAULT
    return {
        field.name: field.default if field.default_factory is missing else field.default_factory() for field in fields
    }


def resolve(server_args: Any) -> None:
    """Makes SGLang decide what the user left open, as its launchers do first of all; once, and not again."""
    # Before 0.5.20 construction did it.
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()


def resolved(server_args: Any, name: str) -> Any:
    """The value of a server argument after `resolve`."""
    if not hasattr(server_args, "resolve_once"):
        return getattr(server_args, name)
    from sglang.srt.arg_groups.overrides import resolution_result

    return resolution_result(server_args, name)


def model_config(server_args: Any) -> Any:
    """SGLang's `ModelConfig` of resolved server arguments."""
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(server_args)


# --- models --------------------------------------------------------------------------------------------------------


def model_shape(model_config: Any) -> ModelShape:
    """What identifies the model of SGLang's `ModelConfig`, before any tensor parallelism."""
    return ModelShape(
        architecture=model_config.hf_config.architectures[0],
        layers=model_config.num_hidden_layers,
        kv_heads=model_config.get_total_num_kv_heads(),
        head_dim=model_config.head_dim,
    )


# --- tensor parallelism --------------------------------------------------------------------------------------------


def has_tested_ranks() -> bool:
    """Whether tensor parallelism counts as tested on the installed SGLang."""
    release = importlib.metadata.version("sglang").split("+")[0]
    # Those that are not tested at all have been allowed by a flag.
    return release in TENSOR_PARALLEL_RELEASES or release not in TESTED_RELEASES


def rank_here() -> tuple[int, int]:
    """The rank of this scheduler process among those that share the attention heads, and how many there are."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.attn_tp_rank), int(parallel.attn_tp_size)


def kv_heads_here(model_config: Any) -> range:
    """Which of the model's KV heads this scheduler process has."""
    return heads_of_rank(model_config.get_total_num_kv_heads(), *rank_here())


def decodes_sparsely(server_args: Any) -> bool:
    """Whether a server with these arguments, of this process or another Engine in it, has our decode backend."""
    return bool(resolved(server_args, "decode_attention_backend") == BACKEND_NAME)


def ranks_of(manager: Any) -> int:
    """Scheduler processes that share the attention heads, from SGLang's TokenizerManager."""
    return int(resolved(manager.server_args, "tp_size"))


def reply_address(manager: Any) -> str:
    """Where SGLang's TokenizerManager receives what schedulers send."""
    import zmq

    return str(manager.recv_from_detokenizer.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())


class Replies:
    """A way of its own to the TokenizerManager, for a scheduler process that SGLang gives none: a rank above 0."""

    def __init__(self) -> None:
        self._sockets: dict[str, Any] = {}

    def send(self, address: str, message: Any) -> None:
        """Sends without waiting; raises zmq.ZMQError if nothing takes the message."""
        import zmq
        from sglang.srt.managers.io_struct import sock_send

        if address not in self._sockets:
            socket: Any = zmq.Context.instance().socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            self._sockets[address] = socket
        sock_send(self._sockets[address], message, zmq.NOBLOCK)


def common_seed(model_runner: Any) -> Any:
    """The server's random seed, which all of its ranks have."""
    return resolved(model_runner.server_args, "random_seed")


# --- pools ---------------------------------------------------------------------------------------------------------


def cache_shape(owner: Any) -> dict[str, Any]:
    """What a `KVCacheConfigurator` knows of the cache before it is sized: arguments of `memory.reserve`."""
    from sglang.srt.runtime_context import get_parallel

    model, arguments = owner.model_config, owner.server_args
    heads = kv_heads_here(model)
    options = SparseDecodeOptions.from_environment()
    assert options is not None
    geometry = Geometry(
        kv_heads=len(heads),
        group_size=max(1, model.num_attention_heads // get_parallel().attn_tp_size // len(heads)),
        head_dim=model.head_dim,
        dtype=owner.kv_cache_dtype,
        page_size=arguments.page_size,
        block_size=options.block_size,
        first_kv_head=heads.start,
    )
    return {
        "geometry": geometry,
        "layers": owner.layer_info.num_effective_layers,
        # The request table is a few tokens wider than the context.
        "max_pages": table_pages(model.context_len + geometry.page_size, geometry.page_size),
        # SGLang's own upper bound where --max-running-requests is not given.
        "max_requests": arguments.max_running_requests or 4096,
        "hidden_size": model.hidden_size,
        "device": owner.device,
    }


def pool_arguments(owner: Any) -> dict[str, Any]:
    """Arguments of SGLang's `KVCache` from a `KVCacheConfigurator`, less the size."""
    return {
        "page_size": owner.pool_page_size,
        "dtype": owner.kv_cache_dtype,
        "layer_num": owner.layer_info.num_effective_layers,
        "device": owner.device,
        "start_layer": owner.layer_info.start_layer,
        "end_layer": owner.layer_info.end_layer,
    }


def cannot_add_now() -> Any:
    """What `PrefillAdder.add_one_req` says of a request that has to wait for the next batch."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.OTHER


def end_chunk_with_page(adder: Any, req: Any) -> bool:
    """Makes the chunk that `PrefillAdder.add_chunked_req` cut off `req` end with a page; whether more is left of it.

    SGLang cuts a chunk to the tokens that the pool has left beside what running requests reserve, which need not be
    whole pages. A page that is begun is taken whole, so that a chunk below one may fill it.
    """
    page, chunk = adder.page_size, req.extend_range
    end = chunk.end // page * page
    if end <= chunk.start:
        end = min(chunk.start // page * page + page, len(req.full_untruncated_fill_ids))
    req.set_extend_range(chunk.start, end)
    return end < len(req.full_untruncated_fill_ids)


def add_chunk_of_whole_pages(original: Callable, adder: Any, req: Any) -> Any:
    """Goes around `PrefillAdder.add_chunked_req`: `end_chunk_with_page`."""
    # SGLang returns the request if more of it is left for later batches.
    if original(adder, req) is None:
        return None
    return req if end_chunk_with_page(adder, req) else None


def context_tokens(owner: Any) -> int:
    """Tokens of the longest request, from a `KVCacheConfigurator`."""
    return int(owner.model_config.context_len)


def logs_decode_now(reporter: Any) -> bool:
    """Whether SGLang's `report_decode_stats` logs a line in this call."""
    due = reporter.forward_ct_decode % reporter.decode_log_interval == 0
    return due and (reporter.is_stats_logging_rank or reporter.current_scheduler_metrics_enabled)


def http_app() -> Any:
    """SGLang's FastAPI application."""
    from sglang.srt.entrypoints.http_server import app

    return app


def forward_stream(scheduler: Any) -> Any:
    """A context of the stream that a Scheduler's forwards run on; None if that is the current one."""
    return scheduler.forward_stream_ctx if scheduler.enable_overlap else None


def real_requests(forward_batch: Any) -> int:
    """Requests of a decode batch without those that pad it to the size of a CUDA graph."""
    return int(forward_batch.batch_size) - getattr(forward_batch, "num_padding", 0)


def most_tokens(req: Any) -> int:
    """The most tokens that a running request can have in its next decode step."""
    # Under overlap output_ids lags by one; the token of the step itself is the last one sampled.
    return len(req.origin_input_ids) + len(req.output_ids) + 1


def exports_metrics(model_runner: Any) -> bool:
    """Whether the server was started with `--enable-metrics`."""
    return bool(model_runner.server_args.enable_metrics)


def can_export_metrics(reporter: Any) -> bool:
    """Whether a SchedulerMetricsReporter can: with `--enable-metrics` on every rank, though SGLang's own series are of
    the first one."""
    return bool(reporter.current_scheduler_metrics_enabled or getattr(reporter, "enable_metrics", False))


def is_first_rank(reporter: Any) -> bool:
    """Whether this is the rank that speaks for what all ranks count alike."""
    return bool(reporter.is_stats_logging_rank)


def explain_missing_metrics() -> None:
    """Makes `/metrics` of a server without `--enable-metrics` say so; call it before the server starts.

    It stays an HTTP 404, so that Prometheus takes the server for one that cannot be scraped.
    """
    from fastapi.responses import JSONResponse

    message = "there are no metrics: start the server with --enable-metrics"

    async def no_metrics() -> JSONResponse:
        return JSONResponse({"error": {"message": message}}, status_code=404)

    http_app().add_api_route("/metrics", no_metrics, methods=["GET"])


class Series:
    """One metric in `/metrics`, labelled as SGLang's own are and by `labels`.

    Args:
        reporter: a scheduler's SchedulerMetricsReporter that exports metrics.
        kind: `counter` (whose name gets `_total`), `gauge` or `histogram`.
        buckets: a histogram's upper bounds.
    """

    def __init__(
        self,
        reporter: Any,
        kind: str,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = (),
    ) -> None:
        # At import, prometheus_client decides on its multiprocess mode, by a variable that SGLang sets in the main
        # process.
        import prometheus_client

        collector = reporter.metrics_collector
        own_class = getattr(collector, f"_{kind}_cls", None)
        more: dict[str, Any] = {}
        if kind == "gauge":
            more["multiprocess_mode"] = "mostrecent"
        elif kind == "histogram":
            more["buckets"] = list(buckets)
        self._sglang_labels = dict(collector.labels)
        self._metric = (own_class or getattr(prometheus_client, kind.capitalize()))(
            name=name, documentation=documentation, labelnames=[*self._sglang_labels, *labels], **more
        )
        self._record = {"counter": "inc", "gauge": "set", "histogram": "observe"}[kind]

    def touch(self, **labels: Any) -> None:
        """Makes the series with these labels, so that its first increase is seen as one."""
        self._metric.labels(**self._sglang_labels, **labels)

    def record(self, value: float, **labels: Any) -> None:
        """Adds `value` to a counter or histogram, or sets a gauge."""
        getattr(self._metric.labels(**self._sglang_labels, **labels), self._record)(value)


def write_kv(pool: Any, layer: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes `k` and `v` (`[n, Hkv, D]`) of one layer to `slots` of SGLang's pool."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool.set_kv_buffer(layer, KVWriteLoc(slots, None), k, v)


def refuse_prompts_without_room(scheduler: Any) -> None:
    """Makes the scheduler refuse prompts that it would never admit, which it answers with HTTP 400.

    SGLang refuses those that do not fit into the pool, but admits only those that leave room for a page and a token
    beside them. With pages of one token these are nearly the same; with larger ones, a prompt in between would wait for
    ever, and all requests after it.
    """
    # Of this length or more, prompts are refused. The last page of one may be nearly empty.
    limit = scheduler.max_total_num_tokens - 2 * scheduler.page_size + 1
    scheduler.max_req_input_len = min(scheduler.max_req_input_len, max(limit, 1))


def live_closed_pages(scheduler: Any, page_size: int) -> torch.Tensor:
    """Physical pages (`[n]` int64, unique) that are full and belong to the prefix cache or a running request."""
    rows = scheduler.req_to_token_pool.req_to_token
    slots = [torch.zeros(0, dtype=torch.int64, device=rows.device)]
    tree = scheduler.tree_cache
    # all_values_flatten of an empty tree raises; a disabled cache keeps no values.
    if hasattr(tree, "all_values_flatten") and _total_size(tree) > 0:
        slots.append(tree.all_values_flatten().to(torch.int64))
    for request in _running_requests(scheduler):
        # Since 0.5.20 a request keeps these in `kv`; in 0.5.17 an object of that name, or None, holds other things.
        held = request if hasattr(request, "req_pool_idx") else request.kv
        if held.req_pool_idx is None:
            continue
        # The last sampled token has no key yet; under overlap output_ids lags by one more, which only checks less.
        written = min(held.kv_committed_len, len(request.origin_input_ids) + len(request.output_ids) - 1)
        slots.append(rows[held.req_pool_idx, : written // page_size * page_size].to(torch.int64))
    return torch.unique(torch.cat(slots) // page_size)


def pool_usage(scheduler: Any) -> dict[str, int]:
    """What SGLang's pools hold: free, cached and all KV slots, free and all request slots."""
    allocator, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    return {
        "free_tokens": int(allocator.available_size()),
        "cached_tokens": int(scheduler.tree_cache.evictable_size()),
        "total_tokens": int(allocator.size),
        "free_requests": int(rows.available_size()),
        "total_requests": int(rows.size),
    }


def _total_size(tree: Any) -> int:
    """Tokens in the prefix cache; some of SGLang's caches count those of sliding-window layers beside them."""
    size = tree.total_size()
    return int(size[0] if isinstance(size, tuple) else size)


def allocates_without_triton(allocator: Any) -> bool:
    """Whether SGLang's paged allocator works on a CPU by itself, as it does since 0.5.23."""
    return hasattr(allocator, "use_triton_kernels")


def _running_requests(scheduler: Any) -> Iterable[Any]:
    batches = [scheduler.running_batch, getattr(scheduler, "last_batch", None)]
    seen = {id(request): request for batch in batches if batch is not None for request in batch.reqs}
    return seen.values()
