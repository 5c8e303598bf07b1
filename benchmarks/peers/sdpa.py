"""torch's scaled dot-product attention on contiguous keys and values, which are copied out of the pages beforehand."""

from __future__ import annotations

from functools import partial

import torch

from . import AttentionInputs, PeerCall
from .dense_copy import contiguous_kv


def why_missing() -> str:
    return ""


def prepare(inputs: AttentionInputs) -> list[PeerCall]:
    """Every request is as long as the longest: keys past its length are read too, and only full rows are right."""
    keys, values = contiguous_kv(inputs)

    def call(q: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, None], keys, values, scale=inputs.scale, enable_gqa=inputs.group_size > 1
        )
        return out[:, :, 0]

    return [PeerCall("contiguous copy", partial(call, inputs.q))]
