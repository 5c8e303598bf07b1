"""The decode attention backend: SGLang's attention contract on one side, the decode step on the other."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_sparse import rank_support, sglang_compat, support
from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.forecast.server import install_forecast
from sglang_sparse.geometry import Geometry, table_pages
from sglang_sparse.observe.audit import CoverageAudit
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.prefill import check_prefill, summarise_prefill

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def checked_geometry(model_runner: ModelRunner, options: SparseDecodeOptions, layers: list[Any]) -> Geometry:
    """What the steps of a model with these attention layers work on; those with a sliding window do not count.

    Raises OptionsError or UnsupportedError if the options or the KV pool do not fit the model.
    """
    pool = model_runner.token_to_kv_pool
    support.check_kv_dtype(pool.dtype, model_runner.model_config.dtype)
    options.check_page_size(pool.page_size)
    windows = support.window_layers(layers)
    layer = next(layer for layer in layers if layer.layer_id not in windows)
    heads = sglang_compat.kv_heads_here(model_runner.model_config)
    rank_support.check_heads(layer.tp_k_head_num, heads)
    options.check_layers(len(layers), sglang_compat.model_shape(model_runner.model_config).kv_heads)
    return Geometry(
        kv_heads=layer.tp_k_head_num,
        group_size=layer.tp_q_head_num // layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        dtype=pool.dtype,
        page_size=pool.page_size,
        block_size=options.block_size,
        first_kv_head=heads.start,
    )


class SparseDecodeBackend(AttentionBackend):
    """Serves decode batches; SGLang's hybrid backend sends everything else to its prefill backend.

    Raises OptionsError if the options, the model or the KV pool do not go together.
    """

    needs_cpu_seq_lens = False
    windows: frozenset[int] = frozenset()
    """Layers with a sliding window."""
    window_backend: AttentionBackend | None = None
    """SGLang's own decode attention, for those layers."""

    def __init__(self, model_runner: ModelRunner, options: SparseDecodeOptions) -> None:
        super().__init__()
        layers = support.attention_layers(model_runner.model)
        pool = model_runner.token_to_kv_pool
        support.check_pool(pool)
        geometry = checked_geometry(model_runner, options, layers)
        self.kv_pool = pool
        self._layers = len(layers)
        self.windows = support.window_layers(layers)
        self._req_to_token = model_runner.req_to_token_pool.req_to_token
        rows, width = self._req_to_token.shape
        self.step = DecodeStep(
            options,
            geometry,
            layers=len(layers),
            pages=pool.get_key_buffer(0).shape[0] // pool.page_size,
            max_requests=rows,
            max_pages=table_pages(width, pool.page_size),
            device=pool.device,
            timed=sglang_compat.exports_metrics(model_runner),
            windows=self.windows,
        )
        install_forecast(model_runner.model, self.step, options)
        self.audit: CoverageAudit | None = None
        if self.step.tap is not None:
            scales = [layer.scaling for layer in layers]
            # All ranks audit the same steps: else each would wait for the audits of the others.
            generator = random.Random(sglang_compat.common_seed(model_runner))
            self.audit = CoverageAudit(self.step, key_pool=pool.get_key_buffer, scales=scales, generator=generator)
        self._prefill_backend: AttentionBackend | None = None
        logger.info(
            "Sparse decode: %d of %d layers (%d have a sliding window), estimator %s, rule %s, path %s, tail %s, "
            "page %d, block %d; page summaries %.2f GB, step buffers %.2f GB.",
            len(self.step.sparse_layers),
            len(layers),
            len(self.windows),
            self.step.estimator.name,
            self.step.rule.name,
            self.step.paths,
            options.resolved_tail,
            pool.page_size,
            options.block_size,
            self.step.summaries.bytes / 1e9,
            self.step.buffers.bytes / 1e9,
        )

    @property
    def has_dense_steps(self) -> bool:
        """Whether a step in which no request selects is a step of another kind, with CUDA graphs of its own."""
        # A forecast that chooses follows every layer of every step. SGLang's backends, which serve window layers, keep
        # the metadata of one graph for each batch size: FlashInfer's plan would reach the one that was captured last.
        return bool(self.step.sparse_layers) and self.step.chooser is None and not self.windows

    @property
    def copies_are_exact(self) -> bool:
        """Whether `pool_copies` are the keys and values that summaries were made of."""
        return True

    def pool_copies(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, `[slots, Hkv, D]`: for checks."""
        keys, values = self.kv_pool.get_kv_buffer(layer)
        return keys, values

    def offload_report(self) -> dict[str, Any] | None:
        """The block `offload` of `/server_info`; None if the KV cache is on the GPU."""
        return None

    def after_log(self, steps: int) -> None:
        """Called with each of the server's own log lines and the decode steps since the last one."""

    def check_slots(self) -> int:
        """Slots of offload that do not hold what they should."""
        return 0

    def attach_prefill(self, prefill_backend: AttentionBackend) -> None:
        """Makes SGLang's prefill backend keep the summaries of the pages it writes."""
        summarise_prefill(
            prefill_backend, self.step.summaries, self.step.geometry.page_size, before_chunk=self._before_chunk
        )
        self._prefill_backend = prefill_backend

    def attach_windows(self, backend: AttentionBackend) -> None:
        """Makes `backend`, one of SGLang's own that nothing else uses, serve the layers with a sliding window."""
        self.window_backend = backend
        self.needs_cpu_seq_lens = backend.needs_cpu_seq_lens

    def _before_chunk(self) -> None:
        if self.audit is not None:
            self.audit.finish()
        if self.step.chooser is not None:
            self.step.chooser.begin(0)

    # SGLang's metadata contract: host work outside the graph, recorded work inside it.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_bs > self.step.buffers.max_requests:
            raise RuntimeError(
                f"CUDA graphs of {max_bs} requests exceed the {self.step.buffers.max_requests} request slots: "
                "lower --cuda-graph-max-bs-decode"
            )
        if self.window_backend is not None:
            self.window_backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        # Padded rows have no tokens: nothing is read, counted or summarised for them.
        return 0 if self.window_backend is None else self.window_backend.get_cuda_graph_seq_len_fill_value()

    def on_after_cuda_graph_warmup(self) -> None:
        if self.window_backend is not None:
            self.window_backend.on_after_cuda_graph_warmup()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """A batch that runs without a graph: SGLang's backends may prepare it in another way than those of graphs."""
        if self.window_backend is None:
            super().init_forward_metadata(forward_batch)
            return
        self._load(forward_batch, in_capture=False)
        self.window_backend.init_forward_metadata(forward_batch)
        self._count(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self._load(forward_batch, in_capture)
        if self.window_backend is not None:
            self.window_backend.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if self.window_backend is not None:
            self.window_backend.init_forward_metadata_in_graph(forward_batch)
        self._count(forward_batch)

    def _begin_step(self) -> None:
        """Before anything of a real step: what was changed meanwhile, and of which kind the step is."""
        self.step.control.before_step()
        self.step.dense = self.has_dense_steps and not self.step.control.may_select

    def _count(self, forward_batch: ForwardBatch) -> None:
        self.step.counters.count_step(self.step.buffers.seq_lens[: forward_batch.batch_size], dense=self.step.dense)

    def _load(self, forward_batch: ForwardBatch, in_capture: bool) -> None:
        """Tells the step of a batch."""
        if self._prefill_backend is None:
            raise RuntimeError("sparse decode is not attached to the prefill backend: page summaries would be missing")
        if self.windows and self.window_backend is None:
            raise RuntimeError("no attention backend is attached for the layers with a sliding window")
        if not in_capture:
            check_prefill(self._prefill_backend, self._layers)
            self._begin_step()
            if self.audit is not None:
                # In a dense step there is no rule to tap.
                self.audit.before_step(0 if self.step.dense else sglang_compat.real_requests(forward_batch))
        batch = forward_batch.batch_size
        if self.step.chooser is not None:
            self.step.chooser.begin(batch)
        self.step.buffers.load(
            self._req_to_token, forward_batch.req_pool_indices[:batch], forward_batch.seq_lens[:batch]
        )
        if self.window_backend is not None:
            # SGLang's backends want a token in padded rows; the rows of a capture are all of that kind.
            real = 0 if in_capture else sglang_compat.real_requests(forward_batch)
            self.step.buffers.empty_rows(real, batch)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Attention of one layer for one token a request: `q` is `[B, Hq * D]`, and so is the result."""
        if layer.layer_id in self.windows:
            assert self.window_backend is not None
            self.step.skip(layer.layer_id, forward_batch.batch_size)
            return self.window_backend.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **unsupported
            )
        if unsupported:
            raise ValueError(f"sparse decode does not support the attention argument {next(iter(unsupported))!r}")
        if save_kv_cache:
            if k is None or v is None:
                raise ValueError(
                    f"layer {layer.layer_id} brings no keys and values: sparse decode needs them in each layer"
                )
            sglang_compat.write_kv(self.kv_pool, layer, forward_batch.out_cache_loc, k, v)
        g = self.step.geometry
        q = q.reshape(-1, g.query_heads, g.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_pool, v_pool = self.kv_pool.get_kv_buffer(layer.layer_id)
        self.step.attend(layer.layer_id, q, k_pool, v_pool, scale=layer.scaling, out=out)
        return out.view(q.shape[0], -1)

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("prefill reached the sparse decode backend: name it as the decode backend only")
