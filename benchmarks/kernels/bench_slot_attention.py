"""Attention over slots, beside `sparse_attention` over a pool on the same lists. Bytes: as for `sparse_attention`.

With `direct`, a share of the blocks is in no slot and is read from pinned host memory by the attention itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import AttentionWorkspace, slot_attention

from .bench_sparse_attention import attention_call, bytes_to_move
from .common import Measurement, Suite, check_close, time_in_turn
from .slots import SlotLayer, fits

DIRECT = (0.0, 0.02)


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size, context and share of kept blocks."""
    workspace = AttentionWorkspace.create(None, suite.group_size, suite.head_dim, suite.device)
    for size, context in suite.cases():
        if not fits(suite, "slot_attention"):
            return
        batch = suite.batch(size, context)
        for kept in suite.kept:
            lists = suite.random_lists(batch, kept)
            moved = bytes_to_move(suite, batch, lists)
            share = moved / bytes_to_move(suite, batch, (None, None))
            expected, out = torch.empty_like(batch.q), torch.empty_like(batch.q)
            plain = attention_call(suite, batch, lists, workspace, expected)
            seconds = time_in_turn([plain])
            yield Measurement("slot_attention", f"pool, kept {kept}", size, context, share, seconds, moved)
            layer = SlotLayer.create(suite, batch, int(lists[1].sum(0).max()))
            layer.step(batch, lists)
            for direct in DIRECT:
                count = math.ceil(direct * layer.maps.slots)
                # Their blocks leave the cache.
                for h in range(suite.num_kv_heads):
                    gone = layer.maps.slot_block[h, :count]
                    layer.maps.slot_map[h, gone[gone >= 0].long()] = -1
                layer.look_up(batch, lists)
                layer.maps.slot_map.clamp_(min=-1)
                layer.fetch.counts.zero_()
                call = partial(
                    slot_attention,
                    batch.q,
                    layer.sources,
                    layer.locations,
                    batch.page_table,
                    batch.seq_lens,
                    *lists,
                    scale=suite.scale,
                    page_size=suite.page_size,
                    block_size=suite.block_size,
                    out=out,
                    workspace=workspace,
                )
                call()
                check_close(f"slot_attention B={size} context={context} kept={kept}", out, expected, 1e-2)
                case = f"slots, {direct:.0%} direct, kept {kept}"
                yield Measurement("slot_attention", case, size, context, share, time_in_turn([call]), moved)
