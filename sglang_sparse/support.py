"""What sparse decode has been tested with: server arguments, models and KV pools; anything else is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_sparse import sglang_compat
from sglang_sparse.option_values import UnsupportedError
from sglang_sparse.sglang_compat import BACKEND_NAME

logger = logging.getLogger(__name__)

TESTED_ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Phi3ForCausalLM", "GemmaForCausalLM", "Gemma3ForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM"),
    *("GraniteForCausalLM", "Olmo2ForCausalLM", "Starcoder2ForCausalLM", "StableLmForCausalLM", "Glm4ForCausalLM"),
    *("ArceeForCausalLM", "ApertusForCausalLM"),
    # Mixtures of experts.
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "GraniteMoeForCausalLM", "Glm4MoeForCausalLM"),
)
"""What `tests/models` runs; docs/models.md has more about them."""
ARCHITECTURES_OF_ALL_RELEASES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""What `tests/server` runs on the releases where `tests/models` does not."""
PREFILL_BACKENDS = ("fa3", "flashinfer", "triton", "torch_native")
HEAD_DIMS = (64, 96, 128, 256)
MAX_GROUP_SIZE = 16

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
    pre_warm_nccl enable_p2p_check enable_hierarchical_cache enable_lmcache enable_lora
    lora_paths lora_backend max_lora_rank lora_target_modules
    max_loras_per_batch max_loaded_loras lora_eviction_policy max_lora_chunk_size
    """.split()  # noqa: SIM905
)

# Values of those arguments that are refused: (argument, is it wrong?, what to say).
_Refusal = tuple[str, Callable[[Any], bool], str]
_REFUSED_VALUES: tuple[_Refusal, ...] = (
    (
        "speculative_algorithm",
        bool,
        "speculative decoding verifies drafts densely in the prefill backend, so that no step would decode sparsely: "
        "remove --speculative-algorithm",
    ),
    (
        "disaggregation_mode",
        lambda value: value not in (None, "null"),
        "pages that prefill-decode disaggregation transfers come without summaries: remove --disaggregation-mode",
    ),
    *(
        (name, bool, f"pages that come back from another cache have no summaries: remove --{name.replace('_', '-')}")
        for name in ("enable_hierarchical_cache", "enable_lmcache")
    ),
    (
        "enable_mixed_chunk",
        bool,
        "--enable-mixed-chunk runs decode rows in the prefill backend, densely: remove it",
    ),
    *(
        (
            name,
            lambda value: bool(value) and not sglang_compat.has_tested_models(),
            "LoRA adapters have not been tested on this SGLang release: use one of "
            f"{', '.join(sglang_compat.MODEL_RELEASES)}, or remove --{name.replace('_', '-')}",
        )
        for name in ("enable_lora", "lora_paths")
    ),
    ("enable_pdmux", bool, "--enable-pdmux is not supported: remove it"),
    ("enable_two_batch_overlap", bool, "--enable-two-batch-overlap is not supported: remove it"),
    (
        "kv_cache_dtype",
        lambda value: value not in (None, "auto", "bf16", "bfloat16"),
        "a quantised KV cache is not supported: use --kv-cache-dtype auto, or --sparse-decode-kv-format split",
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
    prefill = sglang_compat.resolved(server_args, "cuda_graph_config").prefill.backend
    if str(getattr(prefill, "value", prefill)) not in ("disabled", "breakable"):
        raise UnsupportedError(
            f"--sparse-decode: prefill CUDA graphs of the kind {getattr(prefill, 'value', prefill)} are not supported: "
            "use --cuda-graph-backend-prefill breakable or --disable-prefill-cuda-graph"
        )


def warn_without_graphs(server_args: Any) -> None:
    """Logs a warning if decode steps on a GPU will not run in CUDA graphs of whole steps, whoever decided that."""
    decode = sglang_compat.resolved(server_args, "cuda_graph_config").decode.backend
    kind = str(getattr(decode, "value", decode))
    if kind != "full" and str(sglang_compat.resolved(server_args, "device")).startswith("cuda"):
        logger.warning(
            "CUDA graphs of decode steps are %s instead of full: sparse decode then launches its kernels one by one, "
            "and its documentation has no figures of that. Remove --disable-cuda-graph, --disable-decode-cuda-graph or "
            "--cuda-graph-backend-decode, or look above why SGLang changed them.",
            kind,
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


def check_model(model_config: Any) -> None:
    """Raises UnsupportedError if SGLang's `ModelConfig` describes a model that sparse decode does not serve."""
    from sglang.srt.configs.model_config import AttentionArch

    text = model_config.hf_text_config
    architecture = (model_config.hf_config.architectures or ["unknown"])[0]
    head_dim, v_head_dim = model_config.head_dim, model_config.v_head_dim
    for wrong, what in (
        (model_config.attention_arch == AttentionArch.MLA, "multi-head latent attention (MLA)"),
        (getattr(text, "attn_logit_softcapping", None), "attention logit soft-capping"),
        (getattr(model_config, "has_attention_sinks", False), "learned attention sinks"),
        (model_config.is_hybrid_swa, "a KV pool of their own for sliding-window layers"),
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
    tested = TESTED_ARCHITECTURES if sglang_compat.has_tested_models() else ARCHITECTURES_OF_ALL_RELEASES
    if architecture not in tested:
        raise UnsupportedError(
            f"{architecture} has not been tested with --sparse-decode (tested: {', '.join(tested)}): "
            "serve it without --sparse-decode"
        )


def attention_layers(model: torch.nn.Module) -> list[Any]:
    """The model's attention layers, ordered by layer index; raises UnsupportedError if one is of another kind.

    What a layer with a sliding window computes is left to SGLang (`window_layers`), and so is not looked at.
    """
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    layers = sorted(
        (module for module in model.modules() if isinstance(module, RadixAttention)), key=lambda layer: layer.layer_id
    )
    full = [layer for layer in layers if layer.sliding_window_size == -1]
    if not full:
        what = "a model with sliding windows in all layers" if layers else "a model whose attention is not SGLang's own"
        raise UnsupportedError(f"--sparse-decode does not support {what}: serve it without --sparse-decode")
    for layer in full:
        for wrong, what in (
            (layer.logit_cap, "logit soft-capping"),
            (layer.is_cross_attention, "cross attention"),
            (layer.attn_type != AttentionType.DECODER, "bidirectional attention"),
            (layer.v_head_dim != layer.qk_head_dim, "values of another head dim than keys"),
            (layer.xai_temperature_len > 0, "a length-dependent temperature"),
            (
                layer.tp_q_head_num // layer.tp_k_head_num > MAX_GROUP_SIZE,
                f"over {MAX_GROUP_SIZE} query heads a KV head",
            ),
            (_heads(layer) != _heads(full[0]), "other heads than those of other layers"),
        ):
            if wrong:
                raise UnsupportedError(
                    f"--sparse-decode does not support {what}, which layer {layer.layer_id} of the model has: "
                    "serve it without --sparse-decode"
                )
    if [layer.layer_id for layer in layers] != list(range(len(layers))):
        raise UnsupportedError("--sparse-decode needs one attention per layer: serve the model without --sparse-decode")
    return layers


def _heads(layer: Any) -> tuple[int, int, int]:
    return layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim


def window_layers(layers: list[Any]) -> frozenset[int]:
    """Indices of the layers with a sliding window, which SGLang's own decode attention serves."""
    return frozenset(layer.layer_id for layer in layers if layer.sliding_window_size != -1)


def check_no_windows(layers: list[Any], option: str) -> None:
    """Raises UnsupportedError if a layer has a sliding window, which `option` does not serve."""
    for layer in sorted(window_layers(layers)):
        raise UnsupportedError(
            f"{option} does not support a sliding window, which layer {layer} of the model has: remove {option}"
        )


def check_pool(pool: Any) -> None:
    """Raises UnsupportedError unless `pool` is SGLang's plain multi-head KV pool."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        raise UnsupportedError(
            f"--sparse-decode does not support the KV pool {type(pool).__name__}: serve without --sparse-decode"
        )


def check_kv_dtype(kv_dtype: torch.dtype, model_dtype: torch.dtype) -> None:
    """Raises UnsupportedError unless keys and values are kept in the model's float type, that of its queries."""
    if kv_dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UnsupportedError(
            f"--sparse-decode does not support a KV cache of {kv_dtype}: use --kv-cache-dtype bfloat16"
        )
    if kv_dtype != model_dtype:
        raise UnsupportedError(
            f"--sparse-decode does not support a KV cache of {kv_dtype} with a model of {model_dtype}: use "
            "--kv-cache-dtype auto, or another --dtype"
        )
