"""Rule top-delta in one pass, and by way of block lists, at several shares of kept blocks; dense attention beside them.

Bytes: thumbnails of the closed pages, with a tail their mean values, keys and values of the kept blocks. Delta is set
for each row so that it keeps the share that is asked for; which blocks those are is random. The fused pass shares its
pages out equally, and by what each row kept in the call before, which here kept the same. Dense peers run on the same
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sparse_kernels import (
    AttentionTail,
    AttentionWorkspace,
    FusedWorkspace,
    SelectionTap,
    TapPoint,
    block_mass_thumbnail,
    block_statistics,
    fused_top_delta,
    pseudo_maximum,
    sparse_attention,
    sparse_attention_reference,
    top_delta_rule,
)
from sparse_kernels.fused_top_delta import FusedConfig

from benchmarks import peers
from benchmarks.kept_fractions import draw_kept

from .bench_block_mass_thumbnail import make_thumbnails
from .bench_sparse_attention import attention_call, bytes_to_move, measure_peer
from .common import Batch, Measurement, Suite, check_close, time_in_turn

SINK_TOKENS, WINDOW_TOKENS = 16, 128
BITS = (4, 2)


@dataclass(frozen=True)
class Summaries:
    """Of every page of the suite's pool."""

    bits: int
    codes: torch.Tensor
    low_step: torch.Tensor
    means: torch.Tensor

    @classmethod
    def make(cls, suite: Suite, bits: int) -> Summaries:
        means = torch.empty(
            suite.num_pages, suite.num_kv_heads, 1, suite.head_dim, dtype=suite.dtype, device=suite.device
        )
        every_page = torch.arange(suite.num_pages, device=suite.device, dtype=torch.int32)
        block_statistics(
            suite.v_pool,
            every_page,
            kind="mean",
            page_size=suite.page_size,
            block_size=suite.page_size,
            out=means[:, :, :, None],
        )
        return cls(bits, *make_thumbnails(suite, bits), means)

    def page_bytes(self, tail: bool) -> int:
        """What a scan reads of a page and KV head."""
        tensors = (self.codes, self.low_step, *([self.means] if tail else []))
        return sum(tensor[0, 0].nbytes for tensor in tensors)


class Case:
    """One input set: both paths through it, and the deltas that keep what is asked for."""

    def __init__(self, suite: Suite, summaries: Summaries, batch: Batch, kept: str, seed: int) -> None:
        self.suite, self.summaries, self.batch = suite, summaries, batch
        rows = (batch.size, suite.num_kv_heads)
        capacity = batch.page_table.shape[1] * suite.blocks_per_page
        device = suite.device
        self.log_mass = torch.empty(*rows, suite.group_size, capacity, device=device)
        self.block_max = torch.empty_like(self.log_mass)
        self.pseudo_max = torch.empty(*rows, suite.group_size, device=device)
        self.lists = torch.empty(*rows, capacity, dtype=torch.int32, device=device)
        self.kept_mask = torch.empty_like(self.lists, dtype=torch.uint8)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.last_kept = torch.zeros_like(self.counts)
        self.list_counts = torch.zeros_like(self.counts)
        self.out, self.list_out = torch.empty_like(batch.q), torch.empty_like(batch.q)
        self.delta = torch.ones(rows, device=device)
        self._estimate()
        distance = (self.pseudo_max[..., None] - self.block_max).amin(2)
        blocks = (batch.seq_lens + suite.block_size - 1) // suite.block_size
        asked = draw_kept(kept, batch.size * suite.num_kv_heads, seed).view(rows)
        for b in range(batch.size):
            n = int(blocks[b])
            for h in range(suite.num_kv_heads):
                rank = max(1, min(n, round(float(asked[b, h]) * n)))
                self.delta[b, h] = distance[b, h, :n].kthvalue(rank).values

    def _sizes(self, forcing: bool = True) -> dict[str, Any]:
        sizes = {"page_size": self.suite.page_size, "block_size": self.suite.block_size, "min_context": 0}
        return sizes | ({"sink_tokens": SINK_TOKENS, "window_tokens": WINDOW_TOKENS} if forcing else {})

    def _estimate(self) -> None:
        s, b = self.summaries, self.batch
        inputs = (b.q, self.suite.k_pool)
        block_mass_thumbnail(
            *inputs,
            s.codes,
            s.low_step,
            b.page_table,
            b.seq_lens,
            bits=s.bits,
            scale=self.suite.scale,
            out=self.log_mass,
            block_max=self.block_max,
            **self._sizes(forcing=False),
        )
        pseudo_maximum(*inputs, b.page_table, b.seq_lens, scale=self.suite.scale, out=self.pseudo_max, **self._sizes())

    def by_lists(self, workspace: AttentionWorkspace, tail: bool) -> None:
        """Estimate, pseudo-maximum, rule and attention, into `list_out` and `list_counts`."""
        b = self.batch
        self._estimate()
        top_delta_rule(
            self.block_max,
            self.pseudo_max,
            b.seq_lens,
            delta=self.delta,
            block_lists=self.lists,
            block_counts=self.list_counts,
            kept_mask=self.kept_mask if tail else None,
            **self._sizes(),
        )
        sparse_attention(
            b.q,
            self.suite.k_pool,
            self.suite.v_pool,
            b.page_table,
            b.seq_lens,
            self.lists,
            self.list_counts,
            scale=self.suite.scale,
            page_size=self.suite.page_size,
            block_size=self.suite.block_size,
            out=self.list_out,
            workspace=workspace,
            tail=AttentionTail(self.log_mass, self.kept_mask, self.summaries.means) if tail else None,
        )

    def fused(
        self,
        workspace: FusedWorkspace,
        tail: bool,
        config: FusedConfig | None = None,
        tap: TapPoint | None = None,
        by_kept: bool = False,
    ) -> None:
        """The fused pass, into `out` and `counts`; pages shared out equally, or by what each row kept in the last call
        of this kind."""
        s, b = self.summaries, self.batch
        fused_top_delta(
            b.q,
            self.suite.k_pool,
            self.suite.v_pool,
            s.codes,
            s.low_step,
            b.page_table,
            b.seq_lens,
            delta=self.delta,
            bits=s.bits,
            scale=self.suite.scale,
            out=self.out,
            block_counts=self.counts,
            workspace=workspace,
            value_means=s.means if tail else None,
            last_kept=self.last_kept if by_kept else None,
            tap=tap,
            config=config,
            **self._sizes(),
        )

    def check(
        self,
        what: str,
        workspace: FusedWorkspace,
        tail: bool,
        config: FusedConfig | None = None,
        by_kept: bool = False,
    ) -> None:
        """Raises RuntimeError unless the fused pass keeps what the rule keeps, but for blocks at the threshold, and
        attends to what it keeps; looks at the first request."""
        suite, b = self.suite, self.batch.request(0)
        tap = SelectionTap.create(
            kv_heads=suite.num_kv_heads,
            group_size=suite.group_size,
            head_dim=suite.head_dim,
            capacity=self.lists.shape[2],
            dtype=suite.dtype,
            device=suite.device,
        )
        if by_kept:
            self.fused(workspace, tail, config, by_kept=True)
        tap.arm(0, 0)
        self.fused(workspace, tail, config, TapPoint(tap, 0, self.batch.q), by_kept)
        self.by_lists(AttentionWorkspace.create(None, suite.group_size, suite.head_dim, suite.device), tail=True)
        mask = torch.zeros_like(self.kept_mask[:1])
        lists = torch.zeros_like(self.lists[:1])
        for h, count in enumerate(tap.block_counts.tolist()):
            lists[0, h, :count] = tap.block_lists[h, :count].sort().values
            mask[0, h, lists[0, h, :count].long()] = 1
            own = set(lists[0, h, :count].tolist())
            ruled = set(self.lists[0, h, : int(self.list_counts[0, h])].tolist())
            if len(own) != count or len(own ^ ruled) > 4 + len(ruled) // 50:
                differing = f"{len(own ^ ruled)} of {len(ruled)} blocks"
                raise RuntimeError(f"{what}, head {h}: {differing} differ from the rule's")
        expected = torch.empty_like(b.q)
        sparse_attention_reference(
            b.q,
            suite.k_pool,
            suite.v_pool,
            b.page_table,
            b.seq_lens,
            lists,
            tap.block_counts[None],
            scale=suite.scale,
            page_size=suite.page_size,
            block_size=suite.block_size,
            out=expected,
            tail=AttentionTail(self.log_mass[:1], mask, self.summaries.means) if tail else None,
        )
        check_close(what, self.out[0], expected[0], 2e-2)


def make_workspace(suite: Suite, config: FusedConfig | None = None) -> FusedWorkspace:
    """Buffers of the fused pass for the suite's shapes."""
    return FusedWorkspace.create(
        suite.num_kv_heads,
        suite.group_size,
        suite.head_dim,
        suite.dtype,
        page_size=suite.page_size,
        block_size=suite.block_size,
        device=suite.device,
        rows=max(suite.batches) * suite.num_kv_heads,
        config=config,
    )


def dense(suite: Suite, size: int, context: int) -> Iterator[Measurement]:
    """Attention over all blocks: ours and the dense peers'."""
    workspace = AttentionWorkspace.create(None, suite.group_size, suite.head_dim, suite.device)
    sets = suite.input_sets(size, context, 2 * size * context * suite.num_kv_heads * suite.head_bytes)
    nothing = [(None, None)] * len(sets)
    outs = [torch.empty_like(batch.q) for batch in sets]
    calls = [attention_call(suite, batch, (None, None), workspace, out) for batch, out in zip(sets, outs, strict=True)]
    moved = bytes_to_move(suite, sets[0], (None, None))
    ours = Measurement("fused_top_delta", "dense, all blocks", size, context, 1.0, time_in_turn(calls), moved)
    yield ours
    for name in suite.peers:
        if name in peers.DENSE:
            yield from measure_peer(suite, name, sets, nothing, ours)


def cases(suite: Suite, summaries: Summaries, size: int, context: int, kept: str) -> list[Case]:
    """As many input sets as exceed the L2 cache several times."""
    scanned = size * suite.num_kv_heads * (context // suite.page_size) * summaries.page_bytes(tail=True)
    sets = suite.input_sets(size, context, scanned)
    return [Case(suite, summaries, batch, kept, seed) for seed, batch in enumerate(sets)]


def moved_bytes(made: list[Case], tail: bool) -> int:
    """Bytes that any implementation must move for an input set, in the mean."""
    suite, summaries = made[0].suite, made[0].summaries
    pages = int((made[0].batch.seq_lens // suite.page_size).sum()) * suite.num_kv_heads
    blocks = sum(int(case.counts.sum()) for case in made) / len(made)
    return int(pages * summaries.page_bytes(tail) + blocks * suite.block_size * 2 * suite.head_bytes)


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures both paths for every batch size, context and share of kept blocks, with and without a tail."""
    lists_workspace = AttentionWorkspace.create(None, suite.group_size, suite.head_dim, suite.device)
    workspace = make_workspace(suite)
    for size, context in suite.cases():
        yield from dense(suite, size, context)
    for bits in BITS:
        summaries = Summaries.make(suite, bits)
        for size, context in suite.cases():
            for kept in suite.kept:
                made = cases(suite, summaries, size, context, kept)
                total = suite.num_kv_heads * int(((made[0].batch.seq_lens - 1) // suite.block_size + 1).sum())
                for tail in (False, True):
                    name = f"{bits} bits, kept {kept}" + (", tail" if tail else "")
                    calls: dict[str, list[Callable[[], None]]] = {}
                    for way, by_kept in (("fused", False), ("fused by kept", True)):
                        what = f"{way} {name} B={size} context={context}"
                        made[0].check(f"fused_top_delta {what}", workspace, tail, by_kept=by_kept)
                        calls[way] = [partial(case.fused, workspace, tail, by_kept=by_kept) for case in made]
                    calls["lists"] = [partial(case.by_lists, lists_workspace, tail) for case in made]
                    for way, each in calls.items():
                        # What is kept now is what was kept before.
                        for call in each:
                            call()
                        seconds = time_in_turn(each)
                        share = int(made[0].counts.sum()) / total
                        case = f"{way}, {name}"
                        yield Measurement(
                            "fused_top_delta", case, size, context, share, seconds, moved_bytes(made, tail)
                        )
