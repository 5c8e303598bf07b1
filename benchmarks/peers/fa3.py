"""SGLang's dense decode attention on Hopper, FlashAttention 3, called as its `fa3` backend calls it."""

from __future__ import annotations

from functools import cache, partial

import torch

from . import AttentionInputs, PeerCall, import_problem


@cache
def why_missing() -> str:
    return import_problem("sgl_kernel.flash_attn")


def prepare(inputs: AttentionInputs) -> list[PeerCall]:
    """As in the server, the schedule is made once a step, before the layers: it is no part of the call."""
    from sgl_kernel import flash_attn

    batch, heads, head_dim = inputs.q.shape
    pages = (-1, inputs.page_size, inputs.kv_heads, head_dim)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=inputs.q.device)
    schedule = {}
    if hasattr(flash_attn, "get_scheduler_metadata"):
        schedule["scheduler_metadata"] = flash_attn.get_scheduler_metadata(
            batch_size=batch,
            max_seqlen_q=1,
            max_seqlen_k=int(inputs.seq_lens.max()),
            num_heads=heads,
            num_heads_k=inputs.kv_heads,
            headdim=head_dim,
            cache_seqlens=inputs.seq_lens,
            qkv_dtype=inputs.q.dtype,
            cu_seqlens_q=starts,
            page_size=inputs.page_size,
            causal=True,
            has_softcap=False,
            num_splits=0,
        )
    call = partial(
        flash_attn.flash_attn_with_kvcache,
        q=inputs.q,
        k_cache=inputs.k_pool.view(pages),
        v_cache=inputs.v_pool.view(pages),
        page_table=inputs.page_table,
        cache_seqlens=inputs.seq_lens,
        cu_seqlens_q=starts,
        max_seqlen_q=1,
        softmax_scale=inputs.scale,
        causal=True,
        num_splits=0,
        **schedule,
    )
    return [PeerCall("in place", call)]
