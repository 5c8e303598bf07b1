"""The attention backend of an offloaded server: decode over slots, and prefill over staged prefixes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sparse_kernels.slot_maps import TOTALS

from sglang_sparse import sglang_compat, support
from sglang_sparse.backend import checked_geometry
from sglang_sparse.forecast import lookahead
from sglang_sparse.forecast.server import install_forecasts
from sglang_sparse.geometry import table_pages
from sglang_sparse.offload import prefill_attention, shares
from sglang_sparse.offload.decode import OffloadedDecode
from sglang_sparse.offload.kv_pool import OffloadKVPool
from sglang_sparse.offload.prefill import StagedPrefill
from sglang_sparse.offload.streams import CudaStreams
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.own_pool_backend import OwnPoolDecodeBackend, OwnPoolPrefillBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class OffloadDecodeBackend(OwnPoolDecodeBackend):
    """Serves decode batches from slots, open pages and the host pool."""

    has_dense_steps = False
    """What a step reads is looked up by its lists, also where these name all blocks."""

    def __init__(self, model_runner: ModelRunner, options: SparseDecodeOptions) -> None:
        AttentionBackend.__init__(self)
        layers = support.attention_layers(model_runner.model)
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, OffloadKVPool):
            raise RuntimeError(f"the KV pool is {type(pool).__name__}: another plugin replaces that of offload")
        geometry = checked_geometry(model_runner, options, layers)
        self.kv_pool = pool
        self.layers = self._layers = len(layers)
        self.req_to_token = self._req_to_token = model_runner.req_to_token_pool.req_to_token
        rows, width = self.req_to_token.shape
        streams = CudaStreams(pool.device) if torch.device(pool.device).type == "cuda" else None
        self.step = self.own = self.offloaded = OffloadedDecode(
            options,
            geometry,
            pages=pool.pages,
            slots=pool.sizes.slots,
            rows=rows,
            max_requests=rows,
            max_pages=table_pages(width, pool.page_size),
            device=pool.device,
            streams=streams,
            timed=sglang_compat.exports_metrics(model_runner),
        )
        install_forecasts(model_runner.model, self.offloaded, options, [layer.scaling for layer in layers])
        self.prefill = self._staged = StagedPrefill(
            geometry,
            self.offloaded.host,
            self.offloaded.write_chunk,
            staging_tokens=pool.sizes.staging_tokens,
            device=pool.device,
            streams=streams,
            hot=self.offloaded.offload,
        )
        self._advice = shares.ShareAdvice(self.offloaded.cache.totals, list(pool.sizes.slots))
        self.audit = None
        self._prefill_backend: Any = None
        logger.info("Sparse decode with %s.", pool.sizes.describe())

    def make_prefill(self, name: str) -> OwnPoolPrefillBackend:
        """As `OwnPoolDecodeBackend.make_prefill`; chooses what attends."""
        self._staged.attention = prefill_attention.choose(self.step.geometry, self.kv_pool.device, name)
        return super().make_prefill(name)

    @property
    def copies_are_exact(self) -> bool:
        return not self.offloaded.host.float8

    def before_prefill(self) -> None:
        if self.offloaded.lookahead:
            self.offloaded.lookahead.begin(0)
        if self.offloaded.chooser:
            self.offloaded.chooser.begin(0)

    def pool_copies(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, `[slots, Hkv, D]`, copied together from the host pool: for checks."""
        host = self.offloaded.host
        blocks = host.decoded(host.blocks[layer]).permute(3, 0, 2, 4, 1, 5)
        keys, values = blocks.reshape(2, -1, *blocks.shape[-2:]).to(self.kv_pool.device)
        return keys, values

    def offload_report(self) -> dict[str, Any] | None:
        """Sizes, and what was found in slots since start, over layers and KV heads."""
        sizes = self.kv_pool.sizes
        by_layer = self.offloaded.cache.totals.tolist()
        totals = {kind: sum(row[i] for row in by_layer) for i, kind in enumerate(TOTALS)}
        return {
            "host_pages": sizes.host_pages,
            "host_bytes": sizes.host_bytes,
            "slots_by_layer": list(sizes.slots),
            "hot_bytes": sizes.hot_bytes,
            "staging_tokens": sizes.staging_tokens,
            **totals,
            **{f"{kind}_by_layer": [row[i] for row in by_layer] for i, kind in enumerate(TOTALS)},
            "better_slot_shares": shares.better_shares(by_layer, list(sizes.slots)),
            "missed_bytes": totals["misses"] * sizes.host_block_bytes,
            "forecast": lookahead.report(self.offloaded.lookahead, totals["misses"], sizes.host_block_bytes),
        }

    def after_log(self, steps: int) -> None:
        self._advice.after(steps)

    def check_slots(self) -> int:
        """Slots that do not hold their block's bytes, or blocks that are in two slots; waits for the device."""
        wrong = 0
        for maps, hot, host in zip(
            self.offloaded.cache.maps, self.offloaded.cache.hot, self.offloaded.host.blocks, strict=True
        ):
            per_page = host.shape[2]
            for h in range(len(hot)):
                (blocks,) = (maps.slot_map[h] >= 0).nonzero(as_tuple=True)
                slots = maps.slot_map[h, blocks].long()
                wrong += int((maps.slot_block[h, slots] != blocks).sum())
                own = host[(blocks // per_page).cpu(), h, (blocks % per_page).cpu()]
                own = self.offloaded.host.decoded(own).to(hot.device)
                wrong += int((hot[h, slots] != own).flatten(1).any(1).sum())
        return wrong
