"""Calls that compile every Triton kernel, at the sizes and options that change its code.

Nothing is launched: what tensors hold does not matter, their shapes, strides and dtypes do. Only `compile_for_gpu` runs
these calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import sparse_kernels as sk
import torch
from compile_sizes import FEW, GEMMA, HALF, LLAMA, LONG, MIN_CONTEXT, PHI, QWEN, SERVED, SMALL, Sizes, int32
from sparse_kernels import _cluster_launch, _select


@dataclass(frozen=True)
class Case:
    """One call of a public operation."""

    op: str
    variant: str
    call: Callable[[], None]

    @property
    def name(self) -> str:
        return f"{self.op}-{self.variant}" if self.variant else self.op


def block_mass_exact(s: Sizes, maxima: bool) -> None:
    inputs = (s.queries(), s.pool(), s.page_table(), s.seq_lens())
    sk.block_mass_exact(*inputs, **s.mass_sizes, out=s.masses(), block_max=s.masses() if maxima else None)


def block_mass_statistics(s: Sizes, kind: str) -> None:
    rows = sk.STATISTICS_OF_KIND[kind]
    statistics = torch.zeros(s.pool_pages, s.kv_heads, s.per_page, rows, s.head_dim, dtype=s.dtype)
    inputs = (s.queries(), s.pool(), statistics, s.page_table(), s.seq_lens())
    sk.block_mass_statistics(*inputs, **s.mass_sizes, kind=kind, out=s.masses())


def block_mass_thumbnail(s: Sizes, bits: int, maxima: bool) -> None:
    inputs = (s.queries(), s.pool(), *s.thumbnails(bits).values(), s.page_table(), s.seq_lens())
    sk.block_mass_thumbnail(
        *inputs, **s.mass_sizes, bits=bits, out=s.masses(), block_max=s.masses() if maxima else None
    )


def block_score_strided(s: Sizes) -> None:
    means = torch.zeros(s.pool_pages, s.kv_heads, s.page_size // 16, 1, s.head_dim, dtype=s.dtype)
    inputs = (s.queries(), means, s.page_table(), s.seq_lens())
    sk.block_score_strided(*inputs, **s.mass_sizes, out=s.masses())


def expected_blocks(s: Sizes) -> None:
    inputs = (s.masses(), s.page_table(), s.seq_lens(), s.maps().slot_map)
    workspace = sk.ExpectedWorkspace.create(s.batch, s.kv_heads, s.capacity, "cpu")
    lists = {"block_lists": s.lists(), "block_counts": s.counts()}
    sk.expected_blocks(*inputs, budget=int32(1), **s.plain, min_context=MIN_CONTEXT, workspace=workspace, **lists)


def rotated_heads(s: Sizes, interleaved: bool, normed: bool, angles: int) -> None:
    rng = {"positions": torch.zeros(s.batch, dtype=torch.int64), "cos_sin": torch.zeros(64, 2, angles)}
    norm = torch.zeros(s.head_dim) if normed else None
    out = s.queries().float()
    sk.rotated_heads(s.queries(), **rng, interleaved=interleaved, head_norm=norm, eps=1e-5, out=out)


def fused_top_delta(
    s: Sizes, bits: int, tail: bool, more: bool, weighted: bool = False, programs: int | None = None
) -> None:
    rows = s.batch * s.kv_heads
    sizes = {**s.plain, "cells": s.cells, "rows": rows, "num_programs": programs}
    workspace = sk.FusedWorkspace.create(s.kv_heads, s.group_size, s.head_dim, s.dtype, **sizes, device="cpu")
    inputs = (s.queries(), s.pool(), s.pool(), *s.thumbnails(bits).values(), s.page_table(), s.seq_lens())
    sk.fused_top_delta(
        *inputs,
        **s.rule_sizes,
        scale=s.head_dim**-0.5,
        delta=torch.zeros(s.batch, s.kv_heads),
        bits=bits,
        out=s.queries(),
        block_counts=s.counts(),
        workspace=workspace,
        value_means=s.means() if tail else None,
        lse=s.log_sums() if more else None,
        kept_total=s.kept_total() if more else None,
        last_kept=s.counts() if weighted else None,
        tap=s.tap() if more else None,
    )


def attention_arguments(s: Sizes, tail: bool, lse: bool) -> dict[str, Any]:
    return {
        "scale": s.head_dim**-0.5,
        **s.plain,
        "out": s.queries(),
        "workspace": s.workspace(),
        "tail": s.tail() if tail else None,
        "lse": s.log_sums() if lse else None,
    }


def sparse_attention(s: Sizes, lists: bool, tail: bool = False, lse: bool = False) -> None:
    kept = (s.lists(), s.counts()) if lists else (None, None)
    inputs = (s.queries(), s.pool(), s.pool(), s.page_table(), s.seq_lens())
    sk.sparse_attention(*inputs, *kept, **attention_arguments(s, tail, lse))


def slot_attention(s: Sizes, float8: bool, tail: bool, lse: bool = False) -> None:
    sources = sk.SlotSources(
        hot=torch.zeros(s.kv_heads, 64, 2, s.block_size, s.head_dim, dtype=s.dtype),
        slot_map=s.maps().slot_map,
        host=s.host(float8),
        open_k=s.pool(),
        open_v=s.pool(),
        open_rows=int32(s.batch),
    )
    inputs = (s.queries(), sources, s.lists(), s.page_table(), s.seq_lens(), s.lists(), s.counts())
    sk.slot_attention(*inputs, **attention_arguments(s, tail, lse))


def combine(s: Sizes) -> None:
    sk.combine(s.workspace(), s.seq_lens(), s.counts(), block_size=s.block_size, tile=64, out=s.queries())


def select(s: Sizes, rule: str, group: str, more: bool) -> None:
    target = {"gamma": torch.zeros(s.batch)} if rule == "coverage_rule" else {"top_k": torch.zeros(s.batch)}
    getattr(sk, rule)(
        s.masses(),
        s.seq_lens(),
        **target,
        **s.rule_sizes,
        group=group,
        block_lists=s.lists(),
        block_counts=s.counts(),
        scratch=torch.zeros(s.batch, s.kv_heads, s.capacity),
        kept_total=s.kept_total() if more else None,
        kept_mask=s.kept_mask() if more else None,
        tap=s.tap() if more else None,
    )


def select_in_clusters(s: Sizes, rule: str, size: int, more: bool) -> None:
    with patch.object(_select, "chosen_size", lambda log_mass: size):
        select(s, rule, "average", more)


def check_clusters(size: int) -> None:
    constants = {"K": size, "T": _cluster_launch.CHECKED_WORDS}
    _cluster_launch.launch_clusters(_cluster_launch._check_kernel, 1, size, (int32(size, 2),), constants)


def top_delta_rule(s: Sizes, more: bool) -> None:
    sk.top_delta_rule(
        s.masses(),
        torch.zeros(s.batch, s.kv_heads, s.group_size),
        s.seq_lens(),
        delta=torch.zeros(s.batch),
        **s.rule_sizes,
        block_lists=s.lists(),
        block_counts=s.counts(),
        kept_total=s.kept_total() if more else None,
        kept_mask=s.kept_mask() if more else None,
        tap=s.tap() if more else None,
    )


def pseudo_maximum(s: Sizes) -> None:
    inputs = (s.queries(), s.pool(), s.page_table(), s.seq_lens())
    out = torch.zeros(s.batch, s.kv_heads, s.group_size)
    sk.pseudo_maximum(*inputs, scale=s.head_dim**-0.5, **s.rule_sizes, out=out)


def thumbnail(s: Sizes, bits: int, symmetric: bool = False) -> None:
    sk.thumbnail(s.pool(), int32(2), bits=bits, page_size=s.page_size, symmetric=symmetric, **s.thumbnails(bits))


def page_summary(s: Sizes, bits: int, symmetric: bool = False) -> None:
    cell = s.page_size // s.cells
    sizes = {"bits": bits, "page_size": s.page_size, "cell": cell, "symmetric": symmetric}
    sk.page_summary(s.pool(), s.pool(), int32(2), **sizes, **s.thumbnails(bits), means=s.means())


def block_statistics(s: Sizes, kind: str) -> None:
    rows = sk.STATISTICS_OF_KIND[kind]
    out = torch.zeros(s.pool_pages, s.kv_heads, s.per_page, rows, s.head_dim, dtype=s.dtype)
    sk.block_statistics(s.pool(), int32(2), kind=kind, **s.plain, out=out)


def block_gather(s: Sizes) -> None:
    blocks = s.host(False).flatten(0, 2)
    sk.block_gather(blocks, blocks.clone(), int32(4), int32(4), int32(1))


def block_unpack(s: Sizes) -> None:
    packed, blocks = s.host(True).flatten(0, 2), s.host(False).flatten(0, 2)
    sk.block_unpack(packed, blocks, int32(4), int32(4), int32(1))


def block_store(s: Sizes, float8: bool) -> None:
    new = torch.zeros(s.batch, s.kv_heads, s.head_dim, dtype=s.dtype)
    places = torch.zeros(s.batch, dtype=torch.int64), int32(s.batch)
    pools = {"host": s.host(float8), "open_k": s.pool(), "open_v": s.pool()}
    sk.block_store(new, new, *places, s.maps().slot_map, **pools, **s.plain)


def split_pages(s: Sizes) -> dict[str, torch.Tensor]:
    residual = torch.zeros(s.pool_pages, s.kv_heads, s.page_size, s.head_dim, dtype=torch.uint8)
    return {**s.thumbnails(2), "residual": residual}


def split_store(s: Sizes) -> None:
    new = torch.zeros(s.batch, s.kv_heads, s.head_dim, dtype=s.dtype)
    places = torch.zeros(s.batch, dtype=torch.int64), int32(s.batch)
    sk.split_store(new, new, *places, v_pool=s.pool(), open_keys=s.pool())


def split_quantise(s: Sizes) -> None:
    sk.split_quantise(s.pool(), int32(2), page_size=s.page_size, **split_pages(s))


def split_dequantise(s: Sizes) -> None:
    out = torch.zeros(s.kv_heads, 2 * s.page_size, s.head_dim, dtype=s.dtype)
    sk.split_dequantise(*split_pages(s).values(), int32(2), page_size=s.page_size, out=out)


def split_maximum(s: Sizes) -> None:
    keys = sk.SplitKeys(**split_pages(s), open_keys=s.pool(), open_rows=int32(s.batch))
    out = torch.zeros(s.batch, s.kv_heads, s.group_size)
    inputs = (s.queries(), keys, s.page_table(), s.seq_lens())
    sk.split_maximum(*inputs, scale=s.head_dim**-0.5, **s.rule_sizes, out=out)


def split_attention(s: Sizes, lists: bool, tail: bool = False, lse: bool = False) -> None:
    keys = sk.SplitKeys(**split_pages(s), open_keys=s.pool(), open_rows=int32(s.batch))
    kept = (s.lists(), s.counts()) if lists else (None, None)
    inputs = (s.queries(), keys, s.pool(), s.page_table(), s.seq_lens())
    sk.split_attention(*inputs, *kept, **attention_arguments(s, tail, lse))


def slot_lookup(s: Sizes, lag: int, more: bool) -> None:
    inputs = (s.page_table(), s.seq_lens(), s.lists(), s.counts(), int32(1), s.maps(), s.fetch())
    optional = {"locations": s.lists(), "totals": torch.zeros(4, dtype=torch.int64)} if more else {}
    sk.slot_lookup(*inputs, lag=lag, **s.plain, **optional)


def slot_assign(s: Sizes, lag: int, more: bool) -> None:
    optional = {"totals": torch.zeros(4, dtype=torch.int64), "source_pages": int32(s.pool_pages)} if more else {}
    sk.slot_assign(int32(1), s.maps(), s.fetch(), lag=lag, blocks_per_page=s.per_page, **optional)


def prefetch_budget(s: Sizes, clock: bool, most: int = 1024) -> None:
    totals = {"demand_totals": torch.zeros(32, 4, dtype=torch.int64), "forecast_totals": torch.zeros(32, 2).long()}
    sizes = {"least": 58, "most": most, "bytes_per_microsecond": 38_000, "block_bytes": 8192}
    sizes |= {"page_size": 64, "min_context": 4096}
    outputs = {"budgets": int32(32), "lengths": int32(32, s.batch)}
    watch = sk.stopwatch_state(1, "cpu") if clock else None
    sk.prefetch_budget(s.seq_lens(), **totals, clock=watch, state=sk.prefetch_state(32, 9, "cpu"), **sizes, **outputs)


def prefetch_totals(s: Sizes) -> None:
    totals = torch.zeros(2, dtype=torch.int64)
    sk.prefetch_totals(s.fetch(), s.maps(), int32(1), blocks_per_page=s.per_page, totals=totals)


def slot_claim(s: Sizes) -> None:
    sk.slot_claim(int32(16), int32(1), s.maps(), s.fetch(), lag=1)


def snapshot_page_table(s: Sizes, dtype: torch.dtype) -> None:
    sk.snapshot_page_table(
        int32(4, s.table_pages * s.page_size),
        torch.zeros(s.batch, dtype=dtype),
        torch.zeros(s.batch, dtype=dtype),
        page_size=s.page_size,
        page_table=s.page_table(),
        seq_lens_out=s.seq_lens(),
        closing_pages=int32(s.batch),
    )


def open_places(s: Sizes, table: bool) -> None:
    sk.open_places(
        torch.zeros(s.batch, dtype=torch.int64),
        torch.zeros(s.batch, dtype=torch.int64),
        s.seq_lens(),
        page_size=s.page_size,
        pool_slots=torch.zeros(s.batch, dtype=torch.int64),
        open_slots=int32(s.batch),
        open_rows=int32(s.batch),
        closing_pages=int32(s.batch),
        closing_rows=int32(s.batch),
        page_table=s.page_table() if table else None,
    )


def request_totals(s: Sizes) -> None:
    out = torch.zeros(s.batch, 2, dtype=torch.int64)
    counts = int32(32, s.batch, s.kv_heads)
    sk.request_totals(counts, s.seq_lens(), layers=36, dense_layers=4, block_size=s.block_size, out=out)


def step_totals(s: Sizes) -> None:
    totals = torch.zeros(7, dtype=torch.int64)
    sk.step_totals(s.seq_lens(), **s.plain, min_context=MIN_CONTEXT, totals=totals)


def stopwatch(phase: int) -> None:
    sk.stopwatch(int32(1), sk.stopwatch_state(2, "cpu"), phase=phase)


def case(function: Callable[..., None], variant: str, *arguments: Any, op: str = "", **more: Any) -> Case:
    return Case(op or function.__name__, variant, lambda: function(*arguments, **more))


CASES = [
    *(case(block_mass_thumbnail, f"{bits}-bits", LLAMA, bits, False) for bits in (2, 3, 4)),
    *(case(block_mass_thumbnail, f"{bits}-bits-group-7", QWEN, bits, bits == 3) for bits in (2, 3, 4)),
    case(block_mass_thumbnail, "2-bits-small", SMALL, 2, False),
    case(block_mass_thumbnail, "3-bits-one-request", replace(LLAMA, batch=1), 3, True),
    case(block_mass_thumbnail, "4-bits-dim-96", PHI, 4, True),
    *(case(fused_top_delta, f"{bits}-bits-tail", LLAMA, bits, True, True) for bits in (2, 3)),
    case(fused_top_delta, "4-bits-tail-weighted", LLAMA, 4, True, False, weighted=True),
    case(fused_top_delta, "2-bits-weighted-tap", LLAMA, 2, True, True, weighted=True),
    case(fused_top_delta, "2-bits-aligned", LLAMA, 2, False, False, weighted=True, programs=1056),
    case(fused_top_delta, "4-bits-tail-aligned", LLAMA, 4, True, True, weighted=True, programs=1056),
    case(fused_top_delta, "4-bits-tail-group-7", replace(QWEN, head_dim=64), 4, True, False),
    case(fused_top_delta, "2-bits-small", SMALL, 2, False, False),
    *(case(fused_top_delta, f"{bits}-bits-group-7", QWEN, bits, False, False) for bits in (3, 4)),
    case(block_mass_exact, "maxima", LLAMA, True),
    case(block_mass_exact, "small", SMALL, False),
    case(block_mass_statistics, "mean", SMALL, "mean"),
    *(case(block_mass_statistics, kind, LLAMA, kind) for kind in ("mean-variance", "minmax")),
    case(block_score_strided, "", replace(LLAMA, group_size=1, block_size=64)),
    case(block_score_strided, "dim-96", PHI),
    case(expected_blocks, "group-7", replace(QWEN, kv_heads=2)),
    case(expected_blocks, "small", SMALL),
    case(rotated_heads, "normed-dim-96", PHI, False, True, 48),
    case(rotated_heads, "interleaved-part", SMALL, True, False, 16),
    case(sparse_attention, "all-blocks-small", SMALL, lists=False),
    case(sparse_attention, "lists", LLAMA, lists=True, lse=True),
    case(sparse_attention, "tail-group-7", QWEN, lists=True, tail=True, lse=True),
    case(sparse_attention, "dim-256", GEMMA, lists=True),
    case(slot_attention, "lists", LLAMA, float8=False, tail=False),
    case(slot_attention, "tail-group-7", QWEN, float8=False, tail=True, lse=True),
    case(slot_attention, "float8", LLAMA, float8=True, tail=False),
    case(slot_attention, "float8-tail-small", SMALL, float8=True, tail=True),
    case(combine, "", LLAMA),
    *(case(select, group, LLAMA, "coverage_rule", group, True, op="coverage_rule") for group in ("average", "every")),
    case(select, "long", LONG, "coverage_rule", "average", False, op="coverage_rule"),
    *(case(select, group, QWEN, "top_k_rule", group, False, op="top_k_rule") for group in ("average", "every")),
    case(select_in_clusters, "clusters-of-16", LLAMA, "coverage_rule", 16, True, op="coverage_rule"),
    case(select_in_clusters, "clusters-of-8", FEW, "coverage_rule", 8, False, op="coverage_rule"),
    case(select_in_clusters, "clusters-spare", SERVED, "coverage_rule", 16, True, op="coverage_rule"),
    case(select_in_clusters, "clusters-long", HALF, "coverage_rule", 16, False, op="coverage_rule"),
    case(select_in_clusters, "clusters", replace(QWEN, group_size=16), "top_k_rule", 16, True, op="top_k_rule"),
    *(case(check_clusters, f"of-{size}", size, op="prepare_clusters") for size in _cluster_launch.SIZES),
    case(top_delta_rule, "", LLAMA, False),
    case(top_delta_rule, "group-7-tap", QWEN, True),
    case(pseudo_maximum, "", LLAMA),
    case(pseudo_maximum, "small", SMALL),
    case(thumbnail, "2-bits-small", SMALL, 2),
    case(thumbnail, "2-bits-symmetric", LLAMA, 2, True),
    *(case(thumbnail, f"{bits}-bits", LLAMA, bits) for bits in (3, 4)),
    case(page_summary, "2-bits-dim-64", replace(LLAMA, head_dim=64), 2),
    case(page_summary, "3-bits-small", SMALL, 3),
    case(page_summary, "2-bits-symmetric", LLAMA, 2, True),
    case(page_summary, "4-bits-dim-96", PHI, 4),
    *(case(block_statistics, kind, LLAMA, kind) for kind in ("mean", "mean-variance", "minmax")),
    case(block_gather, "", LLAMA),
    case(block_unpack, "", LLAMA),
    case(block_unpack, "small", SMALL),
    case(block_store, "", LLAMA, False),
    case(block_store, "float8", LLAMA, True),
    case(block_store, "float8-small", SMALL, True),
    case(split_store, "", LLAMA),
    *(case(split_quantise, variant, sizes) for variant, sizes in (("", LLAMA), ("small", SMALL), ("dim-96", PHI))),
    *(case(split_dequantise, variant, sizes) for variant, sizes in (("", LLAMA), ("small", SMALL))),
    *(
        case(split_maximum, variant, sizes)
        for variant, sizes in (("", LLAMA), ("small", SMALL), ("dim-96", PHI), ("group-7", QWEN), ("dim-256", GEMMA))
    ),
    case(split_attention, "all-blocks-small", SMALL, lists=False),
    case(split_attention, "tail", LLAMA, lists=True, tail=True),
    case(split_attention, "tail-group-7", QWEN, lists=True, tail=True, lse=True),
    case(slot_lookup, "", LLAMA, 0, True),
    case(slot_lookup, "prefetch", QWEN, 1, False),
    case(slot_assign, "", LLAMA, 0, True),
    case(slot_assign, "prefetch", QWEN, 1, False),
    case(prefetch_budget, "clock", LLAMA, True),
    case(prefetch_budget, "", LLAMA, False),
    case(prefetch_budget, "one block", LLAMA, True, 1),
    case(prefetch_totals, "", LLAMA),
    case(slot_claim, "", LLAMA),
    case(open_places, "table", LLAMA, True),
    case(open_places, "", SMALL, False),
    case(snapshot_page_table, "int32", LLAMA, torch.int32),
    case(snapshot_page_table, "int64", SMALL, torch.int64),
    case(request_totals, "", LLAMA),
    case(step_totals, "", LLAMA),
    case(stopwatch, "start", -1),
    case(stopwatch, "phase", 1),
]
