"""Prefill over split keys: they are put together again, layer by layer and request by request."""

from __future__ import annotations

import math

import torch
from sparse_kernels import split_dequantise

from sglang_sparse.dense_attention import DenseAttention, TorchDense
from sglang_sparse.dense_prefill import PrefillBatch, attend_to_prefixes
from sglang_sparse.split.decode import SplitDecode

PAGES_AT_ONCE = 256
"""Pages whose values are copied at a time."""


class SplitPrefill:
    """Dense attention of prefill batches. For each batch: `begin`, then `attend` for every layer in order, then `end`.

    Keys are read as they are kept, those of pages that the batch fills too: what a token is given then does not depend
    on where chunks and cached prefixes end, and decode reads the same keys. Only a request's open page is exact.

    Args:
        decode: has the pools.
        staging_tokens: of the longest request.
    """

    def __init__(self, decode: SplitDecode, *, staging_tokens: int) -> None:
        self._decode = decode
        g = decode.geometry
        self._staging = torch.empty(
            2 * staging_tokens * g.kv_heads * g.head_dim, dtype=g.dtype, device=decode.open_keys.device
        )
        """Keys and values of one request at a time."""
        self.attention: DenseAttention = TorchDense()
        self._batch: PrefillBatch | None = None

    def begin(self, batch: PrefillBatch) -> None:
        """Announces a batch. Raises ValueError if a prefix ends within a page, or if a request is too long."""
        g = self._decode.geometry
        batch.check(g.page_size)
        longest = max((p + e for p, e in zip(batch.prefix_lens, batch.extend_lens, strict=True)), default=0)
        room = self._staging.numel() // (2 * g.kv_heads * g.head_dim)
        if longest > room:
            raise ValueError(f"a request of {longest} tokens exceeds the staging of {room}")
        self._batch = batch
        self._pool_slots, self._open_slots = batch.places(g.page_size)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        """Causal attention of the new tokens over prefixes and themselves, and storage of their keys and values.

        Args:
            q: `[T, Hq, D]`.
            k, v: `[T, Hkv, D]`.
            out: `[T, Hq, D]`, written.
        """
        assert self._batch is not None
        batch, decode, g = self._batch, self._decode, self._decode.geometry
        keys, values = decode.keys(layer), decode.values[layer].unflatten(0, (-1, g.page_size))
        decode.write_chunk(layer, k, v, self._pool_slots, self._open_slots, batch.extend_lens)

        def put_together(pages: torch.Tensor, out: torch.Tensor) -> None:
            split_dequantise(keys.codes, keys.low_step, keys.residual, pages, page_size=g.page_size, out=out)

        def replace_keys(r: int, new: torch.Tensor) -> None:
            first, full = batch.prefix_lens[r] // g.page_size, batch.extend_lens[r] // g.page_size
            if full:
                put_together(batch.page_table[r, first : first + full], new[:, : full * g.page_size])

        def copy_prefix(r: int, both: torch.Tensor) -> None:
            pages = batch.page_table[r, : batch.prefix_lens[r] // g.page_size]
            put_together(pages, both[0])
            target = both[1].unflatten(1, (len(pages), g.page_size))
            # In parts, whose copy by page is small beside the staging.
            for first in range(0, len(pages), PAGES_AT_ONCE):
                part = slice(first, first + PAGES_AT_ONCE)
                target[:, part] = values[pages[part].long()].permute(2, 0, 1, 3)

        def make_room(shape: tuple[int, ...]) -> torch.Tensor:
            return self._staging[: math.prod(shape)].view(shape)

        lengths = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        attend_to_prefixes(
            g,
            lengths,
            q,
            k,
            v,
            copy_prefix=copy_prefix,
            make_room=make_room,
            scale=scale,
            out=out,
            replace_keys=replace_keys,
            attention=self.attention,
        )

    def end(self) -> None:
        """After the last layer."""
        self._batch = None
