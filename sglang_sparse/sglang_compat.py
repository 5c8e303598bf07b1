"""What depends on the SGLang release, and what of SGLang has been tested together with sparse decode.

No other module knows release numbers or reaches for names that moved between releases. Since 0.5.20 server arguments
are sealed records: what SGLang resolves is declared beside them, and one asks for it by name.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sglang_sparse.geometry import Geometry, table_pages
from sglang_sparse.options import ModelShape, OptionsError, SparseDecodeOptions
from sglang_sparse.options import flag as option_flag

logger = logging.getLogger(__name__)

BACKEND_NAME = "sparse_decode"
TESTED_RELEASES = ("0.5.17", "0.5.20", "0.5.23")
TESTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PREFILL_BACKENDS = ("fa3", "flashinfer", "triton", "torch_native")
HEAD_DIMS = (64, 96, 128, 256)
MAX_GROUP_SIZE = 16

# Hook targets. Those of the main process add the flags; those of the scheduler process install sparse decode.
ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
BUILD_BACKEND = (
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup._build_full_attention_backend_from_str"
)
CREATE_POOL_CONFIGURATOR = "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator"
INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
REPORT_DECODE = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats"
REPORT_IDLE = (
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter._maybe_log_idle_metrics"
)
ALLOC_EXTEND = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend"
ALLOC_DECODE = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_decode"

# Those of control at run time: of the process that receives requests, of the one that serves HTTP, of the scheduler's.
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
INIT_COMMUNICATORS = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators"
CREATE_TOKENIZED = f"{_TOKENIZER_MANAGER}._create_tokenized_object"
GENERATE_REQUEST = f"{_TOKENIZER_MANAGER}.generate_request"
RUN_HTTP_SERVER = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
CHAT_STREAM = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream"
_COMPLETION = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"
COMPLETION_STREAM = f"{_COMPLETION}._generate_completion_stream"
COMPLETION_ANSWER = f"{_COMPLETION}._handle_non_streaming_request"
INIT_DISPATCHER = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
_RESULT_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
PROCESS_DECODE = f"{_RESULT_PROCESSOR}.process_batch_result_decode"
COLLECT_INFO = f"{_RESULT_PROCESSOR}._maybe_collect_customized_info"

MAIN_TARGETS = (ADD_CLI_ARGS, FROM_CLI_ARGS)
TOKENIZER_TARGETS = (INIT_COMMUNICATORS, CREATE_TOKENIZED, GENERATE_REQUEST)
HTTP_TARGETS = (RUN_HTTP_SERVER, CHAT_STREAM, COMPLETION_STREAM, COMPLETION_ANSWER)
SCHEDULER_TARGETS = (
    BUILD_BACKEND,
    CREATE_POOL_CONFIGURATOR,
    INTERNAL_STATE,
    REPORT_DECODE,
    REPORT_IDLE,
    ALLOC_EXTEND,
    ALLOC_DECODE,
    INIT_DISPATCHER,
    RUN_BATCH,
    PROCESS_DECODE,
    COLLECT_INFO,
)


def hook_targets() -> dict[str, tuple[str, ...]]:
    """All hook targets: the tuples above, by their names."""
    return {name: value for name, value in globals().items() if name.endswith("_TARGETS")}


POINTS_MODULE = "sglang.srt.sparse_decode_points"
"""Only an SGLang that is patched for sparse decode (patches/) has this module."""


def is_patched() -> bool:
    """Whether SGLang calls sparse decode by itself, so that there is nothing to hook."""
    try:
        return importlib.util.find_spec(POINTS_MODULE) is not None
    except ModuleNotFoundError:
        return False


def decodes_nothing() -> bool:
    """Whether this is a process of SGLang without a model: some of them load plugins too, since 0.5.23."""
    from setproctitle import getproctitle

    return getproctitle().startswith(("sglang::detokenizer", "sglang::data_parallel_controller"))


class UnsupportedError(OptionsError):
    """Sparse decode does not work with what was asked for. One line: what, and what to use instead."""


def check_release(allow_untested: bool = False) -> None:
    """Raises UnsupportedError unless the installed SGLang release has been tested, or `allow_untested`."""
    release = importlib.metadata.version("sglang")
    if release.split("+")[0] in TESTED_RELEASES:
        return
    if not allow_untested:
        raise UnsupportedError(
            f"SGLang {release} has not been tested with --sparse-decode: install one of {', '.join(TESTED_RELEASES)}, "
            f"or add {option_flag('allow_untested_sglang')}"
        )
    logger.warning(
        "SGLang %s has not been tested with sparse decode (tested: %s).", release, ", ".join(TESTED_RELEASES)
    )


# --- server arguments ----------------------------------------------------------------------------------------------

# Arguments that may be given together with --sparse-decode: used in tests or GPU runs, handled where sparse decode has
# no part (HTTP, tokenizer, logging, weights, sampling, scheduling order), or judged below.
_ALLOWED_ARGUMENTS = frozenset(
    """
    model_path tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
    load_format model_loader_extra_config trust_remote_code context_length revision
    json_model_override_args dtype quantization kv_cache_dtype enable_tf32_matmul mem_fraction_static
    max_running_requests max_queued_requests max_total_tokens chunked_prefill_size max_prefill_tokens
    prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption
    default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
    priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness page_size
    radix_eviction_policy disable_radix_cache disable_overlap_schedule
    scheduler_recv_interval nccl_port dist_timeout tp_size pp_size device
    base_gpu_id gpu_id_step random_seed watchdog_timeout soft_watchdog_timeout sleep_on_idle custom_sigquit_handler
    numa_node gc_threshold host port fastapi_root_path skip_server_warmup warmups enable_http2 ssl_keyfile
    ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name
    weight_version chat_template hf_chat_template_name completion_template file_storage_path enable_cache_report
    reasoning_parser default_chat_template_kwargs strip_thinking_cache enable_strict_thinking tool_call_parser
    tool_server sampling_defaults preferred_sampling_params allow_auto_truncate stream_interval batch_notify_size
    stream_response_default_include_usage incremental_streaming_output log_level log_level_http log_requests
    log_requests_level log_requests_format log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder
    show_time_cost enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers
    load_snapshot_publish_interval tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels
    extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency
    prompt_tokens_buckets generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
    enable_request_time_stats_logging enable_trace trace_modules otlp_traces_endpoint export_metrics_to_file
    export_metrics_to_file_dir stat_loggers constrained_json_whitespace_pattern
    constrained_json_disable_any_whitespace attention_backend decode_attention_backend prefill_attention_backend
    sampling_backend grammar_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops cuda_graph_config
    cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
    cuda_graph_bs_decode cuda_graph_bs_prefill disable_prefill_cuda_graph disable_decode_cuda_graph
    disable_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc
    triton_attention_reduce_in_fp32 triton_attention_num_kv_splits triton_attention_split_tile_size
    disable_custom_all_reduce speculative_algorithm disaggregation_mode enable_mixed_chunk enable_pdmux
    enable_two_batch_overlap weight_loader_disable_mmap weight_loader_prefetch_checkpoints
    weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load download_dir model_checksum
    checkpoint_engine_wait_weights_before_ready enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode
    enable_custom_logit_processor enable_return_hidden_states return_hidden_states_mode disable_outlines_disk_cache
    pre_warm_nccl enable_p2p_check
    """.split()  # noqa: SIM905
)

# Values of those arguments that are refused: (argument, is it wrong?, what to say).
_Refusal = tuple[str, Callable[[Any], bool], str]
_REFUSED_VALUES: tuple[_Refusal, ...] = (
    ("speculative_algorithm", bool, "speculative decoding is not supported: remove --speculative-algorithm"),
    (
        "disaggregation_mode",
        lambda value: value not in (None, "null"),
        "prefill-decode disaggregation is not supported: remove --disaggregation-mode",
    ),
    (
        "enable_mixed_chunk",
        bool,
        "--enable-mixed-chunk runs decode rows in the prefill backend, densely: remove it",
    ),
    ("enable_pdmux", bool, "--enable-pdmux is not supported: remove it"),
    ("enable_two_batch_overlap", bool, "--enable-two-batch-overlap is not supported: remove it"),
    (
        "kv_cache_dtype",
        lambda value: value not in (None, "auto", "bf16", "bfloat16"),
        "a quantised KV cache is not supported: use --kv-cache-dtype auto",
    ),
    (
        "cuda_graph_backend_prefill",
        lambda value: value == "full",
        "--cuda-graph-backend-prefill full skips the page summaries: use breakable or --disable-prefill-cuda-graph",
    ),
    (
        "tokenizer_worker_num",
        lambda value: (value or 1) > 1,
        "the processes of --tokenizer-worker-num load no plugins, so that requests would not be checked: use 1",
    ),
    ("tp_size", lambda value: (value or 1) > 1, "tensor parallelism has not been tested: use --tp-size 1"),
    ("pp_size", lambda value: (value or 1) > 1, "pipeline parallelism is not supported: use --pp-size 1"),
    (
        "attention_backend",
        lambda value: value not in (None, *PREFILL_BACKENDS),
        f"--attention-backend names the prefill backend: use one of {', '.join(PREFILL_BACKENDS)}",
    ),
    (
        "prefill_attention_backend",
        lambda value: value not in (None, *PREFILL_BACKENDS),
        f"this --prefill-attention-backend has not been tested: use one of {', '.join(PREFILL_BACKENDS)}",
    ),
    (
        "decode_attention_backend",
        lambda value: value not in (None, BACKEND_NAME),
        "--decode-attention-backend conflicts with --sparse-decode: remove one of them",
    ),
)


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


def check_arguments(given: dict[str, Any]) -> None:
    """Raises UnsupportedError if `given`, server arguments that differ from their defaults, rule out sparse decode."""
    for name, wrong, advice in _REFUSED_VALUES:
        if name in given and wrong(given[name]):
            raise UnsupportedError(f"--sparse-decode: {advice}")
    untested = sorted(set(given) - _ALLOWED_ARGUMENTS)
    if untested:
        flag = "--" + untested[0].replace("_", "-")
        raise UnsupportedError(f"{flag} has not been tested with --sparse-decode: remove {flag} or --sparse-decode")


def check_resolved(server_args: Any) -> None:
    """Raises UnsupportedError if SGLang's resolved arguments would run prefill past the page summaries.

    However it was spelled: a prefill graph that records attention replays it without the prefill backend object.
    """
    prefill = resolved(server_args, "cuda_graph_config").prefill.backend
    if str(getattr(prefill, "value", prefill)) not in ("disabled", "breakable"):
        raise UnsupportedError(
            f"--sparse-decode: prefill CUDA graphs of the kind {getattr(prefill, 'value', prefill)} are not supported: "
            "use --cuda-graph-backend-prefill breakable or --disable-prefill-cuda-graph"
        )


def check_prefill_backend(name: str) -> None:
    """Raises UnsupportedError unless `name`, the prefill backend that SGLang builds, has been tested."""
    if name not in PREFILL_BACKENDS:
        raise UnsupportedError(
            f"the prefill backend {name} has not been tested with --sparse-decode: "
            f"set --prefill-attention-backend to one of {', '.join(PREFILL_BACKENDS)}"
        )


def check_environment() -> None:
    """Raises UnsupportedError if an SGLang environment variable rules out sparse decode."""
    from sglang.srt.environ import envs

    for name, what in (
        ("SGLANG_USE_HND_KVCACHE", "the head-major KV cache"),
        ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "sizing the KV cache after graph capture"),
    ):
        if getattr(envs, name).get():
            raise UnsupportedError(f"--sparse-decode does not support {what}: unset {name}")


# --- models --------------------------------------------------------------------------------------------------------


def check_model(model_config: Any) -> None:
    """Raises UnsupportedError if SGLang's `ModelConfig` describes a model that sparse decode does not serve."""
    from sglang.srt.configs.model_config import AttentionArch

    text = model_config.hf_text_config
    architecture = (model_config.hf_config.architectures or ["unknown"])[0]
    sliding = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    head_dim, v_head_dim = model_config.head_dim, model_config.v_head_dim
    for wrong, what in (
        (model_config.attention_arch == AttentionArch.MLA, "multi-head latent attention (MLA)"),
        (sliding or model_config.is_hybrid_swa, "sliding-window attention"),
        (getattr(text, "attn_logit_softcapping", None), "attention logit soft-capping"),
        (getattr(model_config, "has_attention_sinks", False), "learned attention sinks"),
        (model_config.is_encoder_decoder, "cross attention"),
        (model_config.is_multimodal, "multimodal input"),
        (not model_config.is_generation, "embedding or reward models"),
        (v_head_dim != head_dim, f"values of another head dim ({v_head_dim}) than keys ({head_dim})"),
        (head_dim not in HEAD_DIMS, f"head dim {head_dim} (there are kernels for {', '.join(map(str, HEAD_DIMS))})"),
    ):
        if wrong:
            raise UnsupportedError(
                f"--sparse-decode does not support {what}, which {architecture} has: serve it without --sparse-decode"
            )
    if architecture not in TESTED_ARCHITECTURES:
        raise UnsupportedError(
            f"{architecture} has not been tested with --sparse-decode (tested: {', '.join(TESTED_ARCHITECTURES)}): "
            "serve it without --sparse-decode"
        )


def model_shape(model_config: Any) -> ModelShape:
    """What identifies the model of SGLang's `ModelConfig`, before any tensor parallelism."""
    return ModelShape(
        architecture=model_config.hf_config.architectures[0],
        layers=model_config.num_hidden_layers,
        kv_heads=model_config.get_total_num_kv_heads(),
        head_dim=model_config.head_dim,
    )


def attention_layers(model: torch.nn.Module) -> list[Any]:
    """The model's attention layers, ordered by layer index; raises UnsupportedError if one is of another kind."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    layers = sorted(
        (module for module in model.modules() if isinstance(module, RadixAttention)), key=lambda layer: layer.layer_id
    )
    for layer in layers:
        for wrong, what in (
            (layer.logit_cap, "logit soft-capping"),
            (layer.sliding_window_size != -1, "a sliding window"),
            (layer.is_cross_attention, "cross attention"),
            (layer.attn_type != AttentionType.DECODER, "bidirectional attention"),
            (layer.v_head_dim != layer.qk_head_dim, "values of another head dim than keys"),
            (layer.xai_temperature_len > 0, "a length-dependent temperature"),
            (
                layer.tp_q_head_num // layer.tp_k_head_num > MAX_GROUP_SIZE,
                f"over {MAX_GROUP_SIZE} query heads a KV head",
            ),
        ):
            if wrong:
                raise UnsupportedError(
                    f"--sparse-decode does not support {what}, which layer {layer.layer_id} of the model has: "
                    "serve it without --sparse-decode"
                )
    if [layer.layer_id for layer in layers] != list(range(len(layers))):
        raise UnsupportedError("--sparse-decode needs one attention per layer: serve the model without --sparse-decode")
    return layers


# --- pools ---------------------------------------------------------------------------------------------------------


def check_pool(pool: Any) -> None:
    """Raises UnsupportedError unless `pool` is SGLang's plain multi-head KV pool in a float type."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        raise UnsupportedError(
            f"--sparse-decode does not support the KV pool {type(pool).__name__}: serve without --sparse-decode"
        )
    if pool.dtype not in (torch.float16, torch.bfloat16, torch.float32) or pool.store_dtype != pool.dtype:
        raise UnsupportedError(
            f"--sparse-decode does not support a KV cache of {pool.dtype}: use --kv-cache-dtype bfloat16"
        )


def cache_shape(owner: Any) -> dict[str, Any]:
    """What a `KVCacheConfigurator` knows of the cache before it is sized: arguments of `memory.reserve`."""
    from sglang.srt.runtime_context import get_parallel

    model, arguments = owner.model_config, owner.server_args
    kv_heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
    options = SparseDecodeOptions.from_environment()
    assert options is not None
    geometry = Geometry(
        kv_heads=kv_heads,
        group_size=max(1, model.num_attention_heads // get_parallel().attn_tp_size // kv_heads),
        head_dim=model.head_dim,
        dtype=owner.kv_cache_dtype,
        page_size=arguments.page_size,
        block_size=options.block_size,
    )
    return {
        "geometry": geometry,
        "layers": owner.layer_info.num_effective_layers,
        # The request table is a few tokens wider than the context.
        "max_pages": table_pages(model.context_len + geometry.page_size, geometry.page_size),
        # SGLang's own upper bound where --max-running-requests is not given.
        "max_requests": arguments.max_running_requests or 4096,
    }


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


def exports_metrics(model_runner: Any) -> bool:
    """Whether the server was started with `--enable-metrics`."""
    return bool(model_runner.server_args.enable_metrics)


def explain_missing_metrics() -> None:
    """Makes `/metrics` of a server without `--enable-metrics` say so; call it before the server starts.

    It stays an HTTP 404, so that Prometheus takes the server for one that cannot be scraped.
    """
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app

    message = "there are no metrics: start the server with --enable-metrics"

    async def no_metrics() -> JSONResponse:
        return JSONResponse({"error": {"message": message}}, status_code=404)

    app.add_api_route("/metrics", no_metrics, methods=["GET"])


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
