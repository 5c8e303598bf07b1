"""SGLang's dense decode attention on Hopper, FlashAttention 3, called as its `fa3` backend calls it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch


@cache
def why_no_fa3() -> str:
    """Why FA3 cannot be used here, in one line; empty if it can."""
    try:
        import sgl_kernel.flash_attn  # noqa: F401
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # of several kinds, where no Hopper GPU or no fitting CUDA library is found
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


def fa3_call(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    page_size: int,
) -> Callable[[], torch.Tensor]:
    """A call that gives `[B, Hq, D]`. Shapes as in docs/architecture.md.

    As in the server, the schedule is made once a step, before the layers: it is no part of the call.
    """
    from sgl_kernel import flash_attn

    batch, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    schedule = {}
    if hasattr(flash_attn, "get_scheduler_metadata"):
        schedule["scheduler_metadata"] = flash_attn.get_scheduler_metadata(
            batch_size=batch,
            max_seqlen_q=1,
            max_seqlen_k=int(seq_lens.max()),
            num_heads=heads,
            num_heads_k=kv_heads,
            headdim=head_dim,
            cache_seqlens=seq_lens,
            qkv_dtype=q.dtype,
            cu_seqlens_q=starts,
            page_size=page_size,
            causal=True,
            has_softcap=False,
            num_splits=0,
        )
    return partial(
        flash_attn.flash_attn_with_kvcache,
        q=q,
        k_cache=k_pool.view(-1, page_size, kv_heads, head_dim),
        v_cache=v_pool.view(-1, page_size, kv_heads, head_dim),
        page_table=page_table,
        cache_seqlens=seq_lens,
        cu_seqlens_q=starts,
        max_seqlen_q=1,
        softmax_scale=scale,
        causal=True,
        num_splits=0,
        **schedule,
    )
