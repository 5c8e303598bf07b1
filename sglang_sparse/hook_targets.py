"""Functions of SGLang that sparse decode takes part in, by dotted path. `plugin` hooks them; the patches mark them.

Those of the main process add the flags; those of the scheduler process install sparse decode; those of the processes
that receive requests and serve HTTP belong to control at run time. Each path holds in every tested release.
"""

from __future__ import annotations

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
_GRAPH_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
CAPTURE_GRAPH = f"{_GRAPH_RUNNER}.capture_one_shape"
GRAPH_VARIANT = f"{_GRAPH_RUNNER}._resolve_lora_variant"

# With a KV pool of our own alone; a patched SGLang does not call these.
BUILD_KV_POOL = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool"
ADD_ONE_REQUEST = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
ADD_CHUNKED_REQUEST = "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req"
OFFLOAD_HOOKS = (BUILD_KV_POOL, ADD_ONE_REQUEST, ADD_CHUNKED_REQUEST)
SPLIT_HOOKS = (BUILD_KV_POOL, ADD_CHUNKED_REQUEST)

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
    CAPTURE_GRAPH,
    GRAPH_VARIANT,
)


def by_group() -> dict[str, tuple[str, ...]]:
    """All of them: the tuples above, by their names."""
    return {name: value for name, value in globals().items() if name.endswith("_TARGETS")}
