"""Forecast queries from a projection's output, as Llama's and, normed by head, as Qwen3's. Bytes: in and out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sparse_kernels import rotated_heads, rotated_heads_reference

from .common import Measurement, Suite, check_close, time_in_turn

PLACES = 131_072


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size, with and without norms by head."""
    rng = torch.Generator(suite.device).manual_seed(6)
    heads, head_dim = suite.num_kv_heads * suite.group_size, suite.head_dim
    cos_sin = torch.randn((PLACES, 2, head_dim // 2), generator=rng, device=suite.device)
    norm = torch.rand(head_dim, generator=rng, device=suite.device)
    for size in suite.batches:
        for case, head_norm in (("", None), ("normed", norm)):
            y = torch.randn((size, heads, head_dim), generator=rng, device=suite.device).to(suite.dtype)
            places = torch.randint(PLACES, (size,), generator=rng, device=suite.device)
            out = torch.empty(y.shape, dtype=torch.float32, device=suite.device)
            options = {"interleaved": False, "head_norm": head_norm, "eps": 1e-5}
            call = partial(rotated_heads, y, cos_sin, places, **options, out=out)
            call()
            expected = torch.empty_like(out)
            rotated_heads_reference(y, cos_sin, places, **options, out=expected)
            check_close(f"rotated_heads {case} B={size}", out, expected, 1e-3)
            moved = y.nbytes + out.nbytes
            yield Measurement("rotated_heads", case, size, 0, None, time_in_turn([call]), moved)
