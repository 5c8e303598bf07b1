"""The decode attention backend: orchestrates one decode step, holds no math (docs/architecture.md, One decode step)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sparse_kernels import sparse_attention

from sglang_sparse import sglang_compat
from sglang_sparse.buffers import DecodeBuffers
from sglang_sparse.geometry import Geometry
from sglang_sparse.observe.counters import DecodeCounters
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.prefill import summarise_prefill
from sglang_sparse.selection import make_estimator, make_rule
from sglang_sparse.summaries import PageSummaries

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class SparseDecodeBackend(AttentionBackend):
    """Serves decode batches; SGLang's hybrid backend sends everything else to its prefill backend.

    Raises OptionsError if the options, the model or the KV pool do not go together.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner, options: SparseDecodeOptions) -> None:
        super().__init__()
        layers = sglang_compat.attention_layers(model_runner.model)
        pool = model_runner.token_to_kv_pool
        sglang_compat.check_pool(pool)
        options.check_page_size(pool.page_size)
        options.check_layers(len(layers))

        self.options = options
        self.geometry = Geometry(
            kv_heads=layers[0].tp_k_head_num,
            group_size=layers[0].tp_q_head_num // layers[0].tp_k_head_num,
            head_dim=layers[0].qk_head_dim,
            dtype=pool.dtype,
            page_size=pool.page_size,
            block_size=options.block_size,
        )
        self.estimator = make_estimator(options, self.geometry)
        self.rule = make_rule(options, self.geometry)
        dense = set(options.dense_layers) if self.rule.needs_mass else set(range(len(layers)))
        sparse_layers = [layer.layer_id for layer in layers if layer.layer_id not in dense]

        self.kv_pool = pool
        self._req_to_token = model_runner.req_to_token_pool.req_to_token
        rows, width = self._req_to_token.shape
        pages = pool.get_key_buffer(0).shape[0] // pool.page_size
        self.summaries = PageSummaries(self.estimator, sparse_layers, pages, pool.device)
        self._sparse_layers = frozenset(sparse_layers)
        self._buffers = DecodeBuffers(
            self.geometry,
            max_requests=rows,
            max_pages=-(-width // pool.page_size),
            threshold=self.rule.threshold(),
            selects=bool(sparse_layers),
            device=pool.device,
        )
        self.counters = DecodeCounters(
            self.geometry,
            layers=len(layers),
            sparse_layers=sparse_layers,
            scan_bytes=self.estimator.scan_bytes(),
            min_context=options.min_context,
            device=pool.device,
        )
        self._prefill_is_attached = False
        logger.info(
            "Sparse decode: %s of %d layers, estimator %s, rule %s, page %d, block %d; "
            "page summaries %.2f GB, step buffers %.2f GB.",
            len(sparse_layers),
            len(layers),
            self.estimator.name,
            self.rule.name,
            pool.page_size,
            options.block_size,
            self.summaries.bytes / 1e9,
            self._buffers.bytes / 1e9,
        )

    def attach_prefill(self, prefill_backend: AttentionBackend) -> None:
        """Makes SGLang's prefill backend keep the summaries of the pages it writes."""
        summarise_prefill(prefill_backend, self.summaries, self.geometry.page_size)
        self._prefill_is_attached = True

    # SGLang's metadata contract: host work outside the graph, recorded work inside it.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_bs > self._buffers.max_requests:
            raise RuntimeError(
                f"CUDA graphs of {max_bs} requests exceed the {self._buffers.max_requests} request slots of the pool: "
                "lower --cuda-graph-max-bs-decode"
            )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        # Padded rows have no tokens: nothing is read, counted or summarised for them.
        return 0

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        if not self._prefill_is_attached:
            raise RuntimeError("sparse decode is not attached to the prefill backend: page summaries would be missing")
        batch = forward_batch.batch_size
        self._buffers.load(
            self._req_to_token, forward_batch.req_pool_indices[:batch], forward_batch.seq_lens[:batch]
        )

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self.counters.count_step(self._buffers.seq_lens[: forward_batch.batch_size])

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
        if unsupported:
            raise ValueError(f"sparse decode does not support the attention argument {next(iter(unsupported))!r}")
        g, layer_id = self.geometry, layer.layer_id
        if save_kv_cache:
            if k is None or v is None:
                raise ValueError(f"layer {layer_id} brings no keys and values: sparse decode needs a KV cache per layer")
            sglang_compat.write_kv(self.kv_pool, layer, forward_batch.out_cache_loc, k, v)
        q = q.reshape(-1, g.query_heads, g.head_dim)
        out = torch.empty((q.shape[0], g.query_heads, g.head_dim), dtype=q.dtype, device=q.device)
        k_pool, v_pool = self.kv_pool.get_kv_buffer(layer_id)
        is_sparse = layer_id in self._sparse_layers
        if is_sparse:
            self.summaries.update(layer_id, k_pool, self._buffers.closing_pages[: q.shape[0]])
        for start in range(0, q.shape[0], self._buffers.turn):
            stop = min(start + self._buffers.turn, q.shape[0])
            self._attend(q, k_pool, v_pool, layer, slice(start, stop), is_sparse, out)
        return out.view(q.shape[0], -1)

    def _attend(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        layer: RadixAttention,
        turn: slice,
        is_sparse: bool,
        out: torch.Tensor,
    ) -> None:
        """Selection and attention for the requests of one turn."""
        b, g = self._buffers, self.geometry
        rows = slice(0, turn.stop - turn.start)
        page_table, seq_lens = b.page_table[turn], b.seq_lens[turn]
        block_lists = block_counts = None
        if is_sparse:
            block_lists, block_counts = b.block_lists[rows], b.block_counts[rows]
            self.estimator.block_mass(
                q[turn],
                k_pool,
                self.summaries[layer.layer_id],
                page_table,
                seq_lens,
                scale=layer.scaling,
                min_context=self.options.min_context,
                out=b.log_mass[rows],
            )
            self.rule.select(
                b.log_mass[rows],
                seq_lens,
                thresholds=b.thresholds[turn],
                block_lists=block_lists,
                block_counts=block_counts,
                scratch=b.scratch[rows],
                kept_total=self.counters.kept_blocks[layer.layer_id],
            )
        sparse_attention(
            q[turn],
            k_pool,
            v_pool,
            page_table,
            seq_lens,
            block_lists,
            block_counts,
            scale=layer.scaling,
            page_size=g.page_size,
            block_size=g.block_size,
            out=out[turn],
            workspace=b.attention,
        )

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("prefill reached the sparse decode backend: name it as the decode backend only")
