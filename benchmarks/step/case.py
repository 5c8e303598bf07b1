"""A decode step over made-up layers whose attention is peaked, built from the server's own classes.

Keys are noise plus, for each KV head, one direction times a number that a page and a block have in common; queries are
a multiple of that direction. So block masses are about log-normal and belong to pages. The multiple is found for each
row, with the step's own estimator and rule, so that the row keeps the share of blocks that is asked for.
"""

from __future__ import annotations

import torch
from sparse_kernels import sparse_attention

from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.selection import PseudoMaximum, make_estimator
from sglang_sparse.tail import make_tail

PAGE_SPREAD, BLOCK_SPREAD = 2.4, 1.8
"""Standard deviations of what a page's and a block's keys have in common, along their head's direction; noise has 1."""

SINK_STRENGTH = 10.0
"""What the first block's keys have along that direction with rule top-delta, whose threshold is below the largest score
of the forced blocks: in a trained model those hold scores near the row's largest."""

HEAD_SPREAD = 0.3
"""How far the queries of one KV head's group lie apart."""

SEARCH_STEPS = 16
SUMMARY_PAGES = 4096
"""Pages summarised in a call, and given their direction in a piece."""


def bytes_per_layer(geometry: Geometry, options: SparseDecodeOptions, batch: int, context: int) -> int:
    """Device bytes that a layer of a case takes: keys, values and summaries."""
    tail = make_tail(options, geometry)
    summary = make_estimator(options, geometry).summary_bytes() + (tail.summary_bytes() if tail else 0)
    tokens = batch * -(-context // geometry.page_size) * geometry.page_size
    return int(tokens * geometry.kv_heads * (geometry.kv_bytes + summary))


SEARCHED = ("coverage", "top-delta")
"""Rules whose rows keep what is asked for because their queries are scaled."""


class StepCase:
    """`layers` layers of a batch in the middle of decoding, each with keys, values and summaries of its own.

    Args:
        batch, context: requests, and tokens of the first; each other has one less than the one before it.
        kept: `[layers, batch, Hkv]`, the share of blocks that each row is to keep; used by the rules of `SEARCHED`.

    Attributes:
        q: `[layers, B, Hq, D]`.
        pools: keys and values of each layer, `[slots, Hkv, D]`.
        out, dense_out: `[layers, B, Hq, D]`, of the step and of attention over all blocks.
    """

    def __init__(
        self,
        options: SparseDecodeOptions,
        geometry: Geometry,
        *,
        batch: int,
        context: int,
        kept: torch.Tensor,
        device: torch.device | str,
        seed: int = 0,
    ) -> None:
        self.geometry, self.options, self.batch = geometry, options, batch
        self.scale = geometry.head_dim**-0.5
        self.layers = kept.shape[0]
        self.device = torch.device(device)
        self._rng = torch.Generator(self.device).manual_seed(seed)
        columns = -(-context // geometry.page_size)
        pages = 1 + batch * columns
        self.step = DecodeStep(
            options,
            geometry,
            layers=self.layers,
            pages=pages,
            max_requests=batch,
            max_pages=columns,
            device=device,
        )
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
        table = order.view(batch, columns, 1) * geometry.page_size + torch.arange(geometry.page_size)
        lengths = torch.tensor([max(context - b, 1) for b in range(batch)])
        # Row 0 is padding, as in SGLang.
        req_to_token = torch.cat((torch.zeros(1, table[0].numel()), table.flatten(1))).to(torch.int32)
        self.step.buffers.load(
            req_to_token.to(self.device),
            torch.arange(1, batch + 1, device=self.device),
            lengths.to(self.device),
        )
        shape = (self.layers, batch, geometry.kv_heads, geometry.group_size, geometry.head_dim)
        self.q = torch.empty((*shape[:2], geometry.query_heads, geometry.head_dim), dtype=geometry.dtype, device=device)
        self.out, self.dense_out = torch.empty_like(self.q), torch.empty_like(self.q)
        self.pools: list[tuple[torch.Tensor, torch.Tensor]] = []
        every_page = torch.arange(1, pages, dtype=torch.int32, device=self.device)
        for layer in range(self.layers):
            direction = torch.nn.functional.normalize(self._normal(geometry.kv_heads, geometry.head_dim), dim=-1)
            keys = self._peaked_keys(pages, direction)
            if self.step.rule.needs_maxima:
                sinks = (table[:, 0, :1] + torch.arange(geometry.block_size)).to(self.device)
                keys[sinks] += (SINK_STRENGTH * direction).to(geometry.dtype)
            self.pools.append((keys, self._noise(pages)))
            for piece in every_page.split(SUMMARY_PAGES):
                self.step.summaries.update(layer, *self.pools[layer], piece)
            apart = HEAD_SPREAD * torch.nn.functional.normalize(self._normal(*shape[1:]), dim=-1)
            pointed = geometry.head_dim**0.5 * (direction[:, None] + apart)
            if layer in self.step.summaries and self.step.rule.name in SEARCHED:
                pointed *= self._search(layer, pointed, kept[layer].to(self.device))
            self.q[layer] = pointed.flatten(1, 2).to(geometry.dtype)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._rng, device=self.device)

    def _noise(self, pages: int) -> torch.Tensor:
        g = self.geometry
        shape = (pages * g.page_size, g.kv_heads, g.head_dim)
        return torch.empty(shape, dtype=g.dtype, device=self.device).normal_(generator=self._rng)

    def _peaked_keys(self, pages: int, direction: torch.Tensor) -> torch.Tensor:
        g = self.geometry
        keys = self._noise(pages)
        common = PAGE_SPREAD * self._normal(pages, 1, g.kv_heads)
        common = (common + BLOCK_SPREAD * self._normal(pages, g.blocks_per_page, g.kv_heads)).flatten(0, 1)
        blocks = keys.unflatten(0, (-1, g.block_size))
        step = SUMMARY_PAGES * g.blocks_per_page
        for start in range(0, len(blocks), step):
            piece = common[start : start + step, None, :, None] * direction
            blocks[start : start + step] += piece.to(g.dtype)
        return keys

    def _search(self, layer: int, pointed: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The multiple of `pointed` `[B, Hkv, G, D]` with which each row keeps `kept` `[B, Hkv]`: `[B, Hkv, 1, 1]`.

        More peaked rows keep less; bisection on the logarithm, all rows at once.
        """
        blocks = (self.step.buffers.seq_lens[: self.batch] - 1) // self.geometry.block_size + 1
        low = torch.full_like(kept, -6.0)
        high = torch.full_like(kept, 2.5)
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2
            q = (pointed * middle.exp()[:, :, None, None]).flatten(1, 2).to(self.geometry.dtype)
            too_many = self._counts(layer, q) > kept * blocks[:, None]
            low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
        return high.exp()[:, :, None, None]

    def _counts(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Blocks that the step lists for each row of `q` `[B, Hq, D]`: `[B, Hkv]`."""
        step, b = self.step, self.step.buffers
        if step.fused and step.paths.takes_fused(self.batch):
            return self._fused_counts(layer, q)
        counts = torch.empty(self.batch, self.geometry.kv_heads, dtype=torch.int32, device=self.device)
        total = torch.zeros(self.geometry.kv_heads, dtype=torch.int64, device=self.device)
        for start in range(0, self.batch, b.turn):
            turn = slice(start, min(start + b.turn, self.batch))
            rows = slice(0, turn.stop - start)
            maxima = b.maxima.rows(rows) if b.maxima else None
            step.estimator.block_mass(
                q[turn],
                self.pools[layer][0],
                step.summaries[layer],
                b.page_table[turn],
                b.seq_lens[turn],
                scale=self.scale,
                min_context=self.options.min_context,
                out=b.log_mass[rows],
                block_max=maxima.blocks if maxima else None,
            )
            if maxima:
                PseudoMaximum(self.options, self.geometry).write(
                    q[turn],
                    self.pools[layer][0],
                    b.page_table[turn],
                    b.seq_lens[turn],
                    scale=self.scale,
                    min_context=self.options.min_context,
                    maxima=maxima,
                )
            step.rule.select(
                b.log_mass[rows],
                b.seq_lens[turn],
                thresholds=b.thresholds[layer, turn],
                block_lists=b.block_lists[rows],
                block_counts=counts[turn],
                scratch=b.scratch[rows],
                kept_total=total,
                maxima=maxima,
            )
        return counts

    def _fused_counts(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """`_counts` of the fused pass."""
        step, b = self.step, self.step.buffers
        assert step.fused is not None
        counts = torch.empty(self.batch, self.geometry.kv_heads, dtype=torch.int32, device=self.device)
        step.fused.attend(
            q,
            *self.pools[layer],
            step.summaries[layer],
            b.page_table[: self.batch],
            b.seq_lens[: self.batch],
            thresholds=b.thresholds[layer, : self.batch],
            scale=self.scale,
            out=torch.empty_like(q),
            block_counts=counts,
            kept_total=torch.zeros(self.geometry.kv_heads, dtype=torch.int64, device=self.device),
            last_kept=None,
            value_means=None,
            tap=None,
        )
        return counts

    def attend(self, layer: int) -> None:
        """The layer's attention step into `out`."""
        self.step.attend(layer, self.q[layer], *self.pools[layer], scale=self.scale, out=self.out[layer])

    def inputs(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Queries, pools, page table and lengths of a layer, in the order that attention takes them."""
        b = self.step.buffers
        return self.q[layer], *self.pools[layer], b.page_table[: self.batch], b.seq_lens[: self.batch]

    def attend_all(self, layer: int) -> None:
        """Attention over all blocks, by the same kernel and without choosing, into `dense_out`."""
        sparse_attention(
            *self.inputs(layer),
            None,
            None,
            scale=self.scale,
            page_size=self.geometry.page_size,
            block_size=self.geometry.block_size,
            out=self.dense_out[layer],
            workspace=self.step.buffers.attention,
        )

    def difference(self) -> float:
        """How far `out` is from `dense_out`, in the Euclidean norm relative to it."""
        dense = self.dense_out.float()
        return float((self.out.float() - dense).norm() / dense.norm())

    def measure_read(self) -> tuple[float, float]:
        """Runs each layer once: blocks kept ÷ all blocks, and bytes read, the scan included, ÷ all KV bytes.

        Raises RuntimeError if the result is no number anywhere.
        """
        before = self.step.counters.read().steps
        if before:
            raise RuntimeError("measure_read counts from the start: call it once")
        self.step.counters.count_step(self.step.buffers.seq_lens[: self.batch])
        for layer in range(self.layers):
            self.attend(layer)
        if not self.out.isfinite().all():
            raise RuntimeError("the step gave values that are not finite")
        reading = self.step.counters.read()
        assert reading.kept_fraction is not None
        assert reading.bytes_read_fraction is not None
        return reading.kept_fraction, reading.bytes_read_fraction

    @property
    def kv_bytes(self) -> int:
        """Key and value bytes of one layer, of the tokens that the requests have."""
        g = self.geometry
        return int(self.step.buffers.seq_lens[: self.batch].sum()) * g.kv_heads * g.kv_bytes
