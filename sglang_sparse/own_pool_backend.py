"""Attention backends over a KV pool of our own, in which SGLang's kernels would find no keys: decode and prefill.

A request's row of open pages is its `req_pool_idx`, which it keeps from its last chunk of prefill to its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_sparse.backend import SparseDecodeBackend
from sglang_sparse.dense_prefill import PrefillBatch
from sglang_sparse.own_pool_decode import OwnPoolDecode

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class OwnPrefill(Protocol):
    """Dense attention of prefill batches, which stores their keys and values."""

    def begin(self, batch: PrefillBatch) -> None:
        """Announces a batch."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        """One layer: `q` and `out` `[T, Hq, D]`, `k` and `v` `[T, Hkv, D]`."""

    def end(self) -> None:
        """After the last layer."""


class OwnPoolPrefillBackend(AttentionBackend):
    """Serves prefill batches; everything that they need is in the decode backend's pools."""

    needs_cpu_seq_lens = False

    def __init__(self, decode: OwnPoolDecodeBackend) -> None:
        super().__init__()
        self._decode = decode
        self.token_to_kv_pool = decode.kv_pool
        self.open_batch = False
        """Whether a batch was announced whose last layer has not run."""

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_extend() or forward_batch.extend_seq_lens_cpu is None:
            return
        decode, page = self._decode, self._decode.step.geometry.page_size
        decode.before_prefill()
        prefixes = [int(length) for length in forward_batch.extend_prefix_lens_cpu]
        extends = [int(length) for length in forward_batch.extend_seq_lens_cpu]
        rows = forward_batch.req_pool_indices[: len(extends)]
        longest = max((p + e for p, e in zip(prefixes, extends, strict=True)), default=0)
        table = decode.req_to_token[rows.long(), :longest:page] // page
        decode.prefill.begin(PrefillBatch(table.int(), prefixes, extends, rows))
        self.open_batch = True

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Attention of one layer for a prefill batch: `q` is `[T, Hq * D]`, and so is the result."""
        k, v = _own_keys(layer, k, v, save_kv_cache, unsupported)
        g = self._decode.step.geometry
        q = q.reshape(-1, g.query_heads, g.head_dim)
        out = torch.empty_like(q)
        heads = (-1, g.kv_heads, g.head_dim)
        self._decode.prefill.attend(layer.layer_id, q, k.reshape(heads), v.reshape(heads), scale=layer.scaling, out=out)
        if layer.layer_id == self._decode.layers - 1:
            self._decode.prefill.end()
            self.open_batch = False
        return out.view(len(q), -1)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("a decode batch reached the prefill backend of sparse decode's own KV pool")


class OwnPoolDecodeBackend(SparseDecodeBackend):
    """Serves decode batches; subclasses make the pools.

    They set `kv_pool`, `layers`, `req_to_token`, `own` and `prefill`, and what `SparseDecodeBackend` has.
    """

    layers: int
    req_to_token: torch.Tensor
    own: OwnPoolDecode
    """The same as `step`."""
    prefill: OwnPrefill

    def make_prefill(self, name: str) -> OwnPoolPrefillBackend:
        """The prefill backend that belongs to this one; `name` is the one that SGLang would have built."""
        self._prefill_backend: Any = OwnPoolPrefillBackend(self)
        return self._prefill_backend

    def before_prefill(self) -> None:
        """Called as a prefill batch is announced."""

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        if self._prefill_backend is None:
            raise RuntimeError("sparse decode's own KV pool has no prefill backend: another plugin builds it")
        if not in_capture:
            if self._prefill_backend.open_batch:
                raise RuntimeError("the last prefill did not run through all layers of sparse decode's prefill backend")
            self._begin_step()
        batch = forward_batch.batch_size
        rows = forward_batch.req_pool_indices[:batch]
        lengths = forward_batch.seq_lens[:batch]
        self.own.load(self.req_to_token, rows, lengths, rows, forward_batch.out_cache_loc)

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
        k, v = _own_keys(layer, k, v, save_kv_cache, unsupported)
        g = self.step.geometry
        q = q.reshape(-1, g.query_heads, g.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        heads = (-1, g.kv_heads, g.head_dim)
        self.own.decode(layer.layer_id, q, k.reshape(heads), v.reshape(heads), scale=layer.scaling, out=out)
        return out.view(q.shape[0], -1)


def _own_keys(
    layer: RadixAttention,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    saved: bool,
    unsupported: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`k` and `v`; raises ValueError if the call is of a kind that the pool does not serve."""
    if k is None or v is None or not saved or unsupported:
        raise ValueError(
            f"layer {layer.layer_id}: sparse decode's own KV pool needs keys and values in each layer, and nothing else"
        )
    return k, v
