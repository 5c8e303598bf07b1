"""Top-delta selection and attention in one pass (FFD): scan a run of pages, and attend to the blocks that pass.

Two launches, whatever the data: the pass, and `_fused_combine`, which merges the rows that programs shared.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _fused_plan as plan
from . import _fused_shares as fused_shares
from ._attention_plan import check_attention
from ._checks import check_choice, check_contiguous, check_dtype, check_rows, check_shape
from ._dispatch import use_triton
from ._fused_kernel import launch_fused_top_delta
from ._fused_plan import FusedConfig, FusedWorkspace
from .attention_tail import AttentionTail
from .block_mass_thumbnail import block_mass_thumbnail_reference
from .pseudo_maximum import pseudo_maximum_reference
from .selection_tap import TapPoint
from .sparse_attention import sparse_attention_reference
from .thumbnail import BITS, check_thumbnails
from .top_delta_rule import check_delta, check_forcing, top_delta_rule_reference

__all__ = ["FusedConfig", "FusedWorkspace", "fused_rows_are_aligned", "fused_top_delta", "fused_top_delta_reference"]


def fused_rows_are_aligned(
    batch: int,
    kv_heads: int,
    group_size: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    page_size: int,
    block_size: int,
    device: torch.device | str,
) -> bool:
    """Whether `fused_top_delta` with `last_kept` gives no program pages of two rows, by default launch options.

    Programs with pages of two rows find two pseudo-maxima, one after the other, and the others wait for them. Sizes are
    those of `FusedWorkspace.create`.
    """
    config = plan.fused_config(group_size, head_dim, page_size, block_size, dtype)
    return fused_shares.aligned(batch * kv_heads, plan.default_programs(config, kv_heads, device))


def fused_top_delta_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    delta: torch.Tensor,
    bits: int,
    scale: float,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    out: torch.Tensor,
    block_counts: torch.Tensor,
    workspace: FusedWorkspace | None = None,
    value_means: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kept_total: torch.Tensor | None = None,
    last_kept: torch.Tensor | None = None,
    tap: TapPoint | None = None,
) -> None:
    """`fused_top_delta` in plain torch, by the operations that do the same one after another."""
    batch, heads, _ = q.shape
    kv_heads = k_pool.shape[1]
    capacity = page_table.shape[1] * (page_size // block_size)
    shape = (batch, kv_heads, heads // kv_heads, capacity)
    log_mass, block_max = torch.empty(shape, device=q.device), torch.empty(shape, device=q.device)
    pseudo_max = torch.empty(shape[:3], device=q.device)
    lists = torch.empty((*shape[:2], capacity), dtype=torch.int32, device=q.device)
    kept_mask = torch.empty_like(lists, dtype=torch.uint8)
    sizes: dict[str, Any] = {"page_size": page_size, "block_size": block_size}
    forcing = {"sink_tokens": sink_tokens, "window_tokens": window_tokens, "min_context": min_context}
    block_mass_thumbnail_reference(
        q,
        k_pool,
        codes,
        low_step,
        page_table,
        seq_lens,
        bits=bits,
        scale=scale,
        min_context=min_context,
        out=log_mass,
        block_max=block_max,
        **sizes,
    )
    pseudo_maximum_reference(q, k_pool, page_table, seq_lens, scale=scale, out=pseudo_max, **sizes, **forcing)
    top_delta_rule_reference(
        block_max,
        pseudo_max,
        seq_lens,
        delta=delta,
        block_lists=lists,
        block_counts=block_counts,
        kept_total=kept_total,
        kept_mask=kept_mask,
        tap=tap,
        **sizes,
        **forcing,
    )
    sparse_attention_reference(
        q,
        k_pool,
        v_pool,
        page_table,
        seq_lens,
        lists,
        block_counts,
        scale=scale,
        out=out,
        tail=None if value_means is None else AttentionTail(log_mass, kept_mask, value_means),
        lse=lse,
        **sizes,
    )
    if last_kept is not None:
        last_kept[:batch] = block_counts


def fused_top_delta(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    codes: torch.Tensor,
    low_step: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    delta: torch.Tensor,
    bits: int,
    scale: float,
    page_size: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    min_context: int,
    out: torch.Tensor,
    block_counts: torch.Tensor,
    workspace: FusedWorkspace | None,
    value_means: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kept_total: torch.Tensor | None = None,
    last_kept: torch.Tensor | None = None,
    tap: TapPoint | None = None,
    config: FusedConfig | None = None,
    impl: str = "auto",
) -> None:
    """`block_mass_thumbnail`, `top_delta_rule` and `sparse_attention` in one, without masses and lists between them.

    `out[b, h * G + g]` is attention over the kept blocks of row `(b, h)`: forced blocks, and those with a token whose
    score under the thumbnails reaches the pseudo-maximum of its head less delta, for any head of the group. Kept blocks
    are attended to with their keys. With `value_means`, the other blocks add the mean value of their cell, weighted by
    their estimated mass (`AttentionTail`).

    A program finds the pseudo-maxima of its rows itself, from the keys of the forced blocks, so that programs need
    nothing of each other before the combine. A part of a row that keeps nothing has no weight in it.

    Args:
        q: `[B, Hkv * G, D]`, pool dtype, G from 1 to 16.
        k_pool, v_pool: `[P * page_size, Hkv, D]` fp16, bf16 or fp32; last dimension contiguous.
        codes, low_step: as `thumbnail` writes them, symmetric or not; read for closed pages.
        page_table: `[>=B, max_pages]` int32; only the first `ceil(seq_len / page_size)` entries of a row are read.
        seq_lens: `[>=B]` int32, in tokens; 0 for padded rows, which get zeros and counts of 0.
        delta: `[>=B]` or `[>=B, Hkv]` fp32, nats; +inf or NaN keeps all blocks.
        bits: 2, 3 or 4.
        scale: factor of the scores.
        page_size: tokens in a page.
        block_size: tokens in a block; divides `page_size`.
        sink_tokens, window_tokens: as in `coverage_rule`.
        min_context: rows with fewer tokens keep all blocks.
        out: `[B, Hkv * G, D]` in q's dtype, last dimension contiguous; written completely.
        block_counts: `[B, Hkv]` int32, output: blocks kept.
        workspace: see `FusedWorkspace.create`; may be None where the torch reference runs.
        value_means: `[P, Hkv, C, D]` in the pool's dtype, contiguous: mean values of the `C` cells of each closed page;
            None drops what is not kept.
        lse: `[B, Hkv * G]` fp32, contiguous, output: as in `sparse_attention`; optional.
        kept_total: `[Hkv]` int64, increased by the counts; optional.
        last_kept: `[>=B, Hkv]` int32, contiguous: blocks kept in the call before, by which pages are shared out to
            programs; its first B rows are replaced by the counts. Any values do: those of other requests cost time
            only. Neither read nor written by the kernels where `B * Hkv * max_pages` is beyond 26 million. None shares
            out equal numbers of pages.
        tap: gets one request's queries and lists, in any order, if its target names this call; its counts must be 0
            before, as `SelectionTap.arm` leaves them. Optional.
        config: launch options, those that the workspace was created for; None for the default.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    parts = None if workspace is None else workspace.parts
    sizes = (page_size, block_size)
    check_attention(q, k_pool, v_pool, page_table, seq_lens, None, None, *sizes, out, parts, lse)
    check_choice("bits", bits, BITS)
    check_thumbnails(codes, low_step, k_pool, bits, page_size)
    batch, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    check_delta(delta, batch, kv_heads)
    check_forcing(sink_tokens, window_tokens)
    check_shape("block_counts", block_counts, batch, kv_heads)
    check_dtype("block_counts", block_counts, torch.int32)
    if kept_total is not None:
        check_shape("kept_total", kept_total, kv_heads)
        check_dtype("kept_total", kept_total, torch.int64)
    if last_kept is not None:
        check_rows("last_kept", last_kept, batch, ndim=2)
        check_shape("last_kept", last_kept, None, kv_heads)
        check_dtype("last_kept", last_kept, torch.int32)
        check_contiguous("last_kept", last_kept)
    cells = 1
    if value_means is not None:
        check_shape("value_means", value_means, k_pool.shape[0] // page_size, kv_heads, None, head_dim)
        check_dtype("value_means", value_means, k_pool.dtype)
        check_contiguous("value_means", value_means)
        cells = value_means.shape[2]
        allowed = tuple(n for n in (1, 2, 4, 8, 16) if page_size % n == 0 and page_size // n % block_size == 0)
        check_choice("cells a page in value_means", cells, allowed)
    if tap is not None:
        capacity = page_table.shape[1] * (page_size // block_size)
        tap.check((batch, kv_heads, heads // kv_heads, capacity))
    arguments: dict[str, Any] = {
        "delta": delta,
        "bits": bits,
        "scale": scale,
        "page_size": page_size,
        "block_size": block_size,
        "sink_tokens": sink_tokens,
        "window_tokens": window_tokens,
        "min_context": min_context,
        "out": out,
        "block_counts": block_counts,
        "workspace": workspace,
        "value_means": value_means,
        "lse": lse,
        "kept_total": kept_total,
        "last_kept": last_kept,
        "tap": tap,
    }
    inputs = (q, k_pool, v_pool, codes, low_step, page_table, seq_lens)
    if not use_triton(impl, q):
        fused_top_delta_reference(*inputs, **arguments)
        return
    if workspace is None:
        raise ValueError("workspace is needed by the Triton kernels")
    workspace.check(kv_heads, heads // kv_heads, head_dim, page_size, block_size, cells)
    if last_kept is not None:
        check_rows("workspace.spans", workspace.spans, batch * kv_heads, ndim=2)
        if not fused_shares.fits(batch * kv_heads, page_table.shape[1]):
            arguments["last_kept"] = None
    config = config or plan.fused_config(heads // kv_heads, head_dim, page_size, block_size, q.dtype)
    if batch:
        launch_fused_top_delta(*inputs, **arguments, config=config)
