"""Attention over split keys, beside `sparse_attention` over keys as they are on the same lists.

Bytes: residuals, codes and values of the listed blocks, their pages' bounds once a block, and the lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import AttentionWorkspace, split_attention

from benchmarks.kept_fractions import draw_kept, is_number

from .bench_sparse_attention import attention_call, bytes_to_move, make_lists
from .common import Measurement, Suite, check_close, time_in_turn
from .split import split_pages, with_open_pages


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size, context and share of kept blocks."""
    workspace = AttentionWorkspace.create(None, suite.group_size, suite.head_dim, suite.device)
    pages = split_pages(suite)
    key = suite.head_dim * (1.25 + 4 / suite.block_size)
    part = (key + suite.head_bytes) / (2 * suite.head_bytes)
    for size, context in suite.cases():
        for kept in suite.kept:
            share = draw_kept(kept, size * suite.num_kv_heads).mean().item()
            dense = is_number(kept) and share >= 1
            all_bytes = 2 * size * context * suite.num_kv_heads * suite.head_bytes
            sets = suite.input_sets(size, context, int(all_bytes * share * part))
            lists = make_lists(suite, sets, kept)
            expected, outs = ([torch.empty_like(batch.q) for batch in sets] for _ in range(2))
            plain = [
                attention_call(suite, *each, workspace, out) for *each, out in zip(sets, lists, expected, strict=True)
            ]
            split = [
                partial(
                    split_attention,
                    batch.q,
                    with_open_pages(suite, batch, pages),
                    suite.v_pool,
                    batch.page_table,
                    batch.seq_lens,
                    *own,
                    scale=suite.scale,
                    page_size=suite.page_size,
                    block_size=suite.block_size,
                    out=out,
                    workspace=workspace,
                )
                for batch, own, out in zip(sets, lists, outs, strict=True)
            ]
            plain[0]()
            split[0]()
            check_close(f"split_attention B={size} context={context} kept={kept}", outs[0], expected[0], 1e-2)
            moved = sum(bytes_to_move(suite, *each) for each in zip(sets, lists, strict=True)) // len(sets)
            read = moved / bytes_to_move(suite, sets[0], (None, None))
            case = "all blocks" if dense else f"lists, kept {kept}"
            for name, calls, own_bytes in (("pool", plain, moved), ("split", split, int(moved * part))):
                seconds = time_in_turn(calls)
                yield Measurement("split_attention", f"{case}, {name}", size, context, read, seconds, own_bytes)
