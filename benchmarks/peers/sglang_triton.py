"""SGLang's Triton decode attention, called as its `triton` backend calls it."""

from __future__ import annotations

import importlib
from functools import cache, partial
from typing import Any

import torch

from . import AttentionInputs, PeerCall, import_problem

PLACES = ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops")
"""Where releases keep `decode_attention`, the newest first."""

KV_SPLITS = 8
"""SGLang's default of --triton-attention-num-kv-splits."""


@cache
def why_missing() -> str:
    problems = [import_problem(f"{place}.decode_attention") for place in PLACES]
    return "" if "" in problems else problems[0]


def _fill_splits(splits: torch.Tensor, inputs: AttentionInputs) -> None:
    """Splits of each request, chosen as the backend chooses them; all of them where that cannot be called."""
    splits.fill_(KV_SPLITS)
    if not inputs.q.is_cuda:
        return
    try:
        choose: Any = importlib.import_module("sglang.kernels.ops.attention.metadata").get_num_kv_splits_triton
    except (ImportError, AttributeError):
        return
    cores = torch.cuda.get_device_properties(inputs.q.device).multi_processor_count
    batch = len(inputs.seq_lens)
    choose[(1,)](
        splits,
        inputs.seq_lens,
        batch,
        1,
        inputs.q.shape[1],
        inputs.kv_heads,
        KV_SPLITS,
        cores,
        MAX_NUM_SEQ=256,
    )


def prepare(inputs: AttentionInputs) -> list[PeerCall]:
    for place in PLACES:
        if not import_problem(f"{place}.decode_attention"):
            decode = importlib.import_module(f"{place}.decode_attention").decode_attention_fwd
            break
    batch, heads, head_dim = inputs.q.shape
    device = inputs.q.device
    slots, lengths = inputs.slots(), inputs.seq_lens.tolist()
    starts = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    starts[1:] = inputs.seq_lens.cumsum(0)
    splits = torch.empty(batch, dtype=torch.int32, device=device)
    _fill_splits(splits, inputs)
    out = torch.empty_like(inputs.q)
    call = partial(
        decode,
        inputs.q,
        inputs.k_pool,
        inputs.v_pool,
        out,
        starts,
        torch.cat([row[:length] for row, length in zip(slots, lengths, strict=True)]),
        torch.empty(batch, heads, KV_SPLITS, head_dim, dtype=torch.float32, device=device),
        torch.empty(batch, heads, KV_SPLITS, dtype=torch.float32, device=device),
        splits,
        KV_SPLITS,
        inputs.scale,
        1.0,
        1.0,
    )

    def with_output() -> torch.Tensor:
        call()
        return out

    return [PeerCall("in place", with_output)]
