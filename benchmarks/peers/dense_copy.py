"""Contiguous keys and values, for peers that know no pages."""

from __future__ import annotations

import torch

from . import AttentionInputs, PeerError

HEADROOM = 2 << 30
"""Device bytes to leave free."""


def contiguous_kv(inputs: AttentionInputs, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as `[B, Hkv, tokens, D]`, by default as many tokens as the longest request has.

    Raises PeerError if they do not fit.
    """
    slots = inputs.slots()
    if tokens is not None:
        slots = torch.nn.functional.pad(slots, (0, tokens - slots.shape[1]))
    needed = 2 * slots.numel() * inputs.kv_heads * inputs.q.shape[-1] * inputs.k_pool.dtype.itemsize
    if inputs.q.is_cuda and needed + HEADROOM > torch.cuda.mem_get_info()[0]:
        raise PeerError(f"a contiguous copy takes {needed / 1e9:.0f} GB, more than is free")
    shape = (slots.shape[0], inputs.kv_heads, slots.shape[1], inputs.q.shape[-1])
    keys, values = (torch.empty(shape, dtype=pool.dtype, device=pool.device) for pool in (inputs.k_pool, inputs.v_pool))
    for b, row in enumerate(slots):
        keys[b] = inputs.k_pool[row].transpose(0, 1)
        values[b] = inputs.v_pool[row].transpose(0, 1)
    return keys, values
