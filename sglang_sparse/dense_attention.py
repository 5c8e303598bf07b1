"""Dense attention of one request's new tokens over all of its keys, for prefill over KV pools of our own.

Of two kinds, one of which is chosen at start: torch's, or FlashAttention 3 where SGLang would use it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch.nn.attention.bias import causal_lower_right

from sglang_sparse.geometry import Geometry

logger = logging.getLogger(__name__)

FLASH_BACKEND = "fa3"
"""The name that SGLang has for it; any other prefill backend leaves prefill to torch."""

TOLERANCE = 2e-2
"""Of a difference between the two kinds on normal numbers in bfloat16."""


class _Named(Protocol):
    name: str


T = TypeVar("T", bound=_Named)


class DenseAttention(Protocol):
    """Causal attention whose last query sees all keys."""

    name: str

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        """Writes `out [n, Hq, D]` for `q [n, Hq, D]` over `keys` and `values` `[Hkv, t, D]`.

        The last `n` of the `t` tokens are the queries'. Last dimensions are contiguous.
        """


class TorchDense:
    """torch's `scaled_dot_product_attention`."""

    name = "torch"

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        new, total = len(q), keys.shape[1]
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=causal_lower_right(new, total) if total > new else None,
            is_causal=total == new,
            scale=scale,
            enable_gqa=q.shape[1] > keys.shape[0],
        )
        out.copy_(attended[0].transpose(0, 1))


class FlashDense:
    """FlashAttention 3.

    Args:
        varlen: `sgl_kernel.flash_attn`'s `flash_attn_varlen_func`.
    """

    name = "FlashAttention 3"

    def __init__(self, varlen: Callable) -> None:
        self._varlen = varlen

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        new, total = len(q), keys.shape[1]
        # Made on the device: a copy of a host's tensor would wait for all that the stream has to do.
        ends = torch.arange(2, dtype=torch.int32, device=q.device)
        out.copy_(
            self._varlen(
                q=q.contiguous(),
                k=keys.transpose(0, 1),
                v=values.transpose(0, 1),
                cu_seqlens_q=ends * new,
                cu_seqlens_k=ends * total,
                max_seqlen_q=new,
                max_seqlen_k=total,
                softmax_scale=scale,
                causal=True,
            )
        )


def flash_functions(geometry: Geometry, backend: str) -> tuple[Callable, Callable]:
    """`flash_attn_with_kvcache` and `flash_attn_varlen_func` of SGLang's FlashAttention 3.

    Raises:
        ValueError: it does not serve such a server, `backend` being SGLang's name of its prefill backend.
        ImportError: it is not there.
    """
    if backend != FLASH_BACKEND:
        raise ValueError(f"the prefill backend is {backend}, not {FLASH_BACKEND}")
    if geometry.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"the model is of {geometry.dtype}")
    from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    return flash_attn_with_kvcache, flash_attn_varlen_func


def flash_or(fallback: T, make: Callable[[], T], difference: Callable[[T, T], float], device: torch.device | str) -> T:
    """What `make` makes of FlashAttention 3, if `device` is a GPU and it says the same as `fallback`, which is torch's;
    else that. Logs which, and why.

    Args:
        difference: the largest one between two kinds on normal numbers.
    """
    chosen = fallback
    if torch.device(device).type == "cuda":
        try:
            made = make()
            found = difference(made, fallback)
            if not found <= TOLERANCE:
                raise RuntimeError(f"it differs from torch by {found:.3g}")
            chosen = made
        except Exception as error:
            logger.warning(
                "No FlashAttention 3 for prefill (%s: %s); torch takes longer.",
                type(error).__name__,
                " ".join(str(error).split()),
            )
    logger.info("Prefill attention by %s.", chosen.name)
    return chosen


def choose_dense(geometry: Geometry, device: torch.device | str, backend: str) -> DenseAttention:
    """FlashAttention 3 on a GPU where SGLang would use it and it says the same as torch; else torch. Logs which.

    Args:
        backend: SGLang's name of the prefill backend that it would have built.
    """

    def make() -> DenseAttention:
        return FlashDense(flash_functions(geometry, backend)[1])

    def difference(one: DenseAttention, other: DenseAttention) -> float:
        return compare_dense(one, other, geometry, device)

    fallback: DenseAttention = TorchDense()
    return flash_or(fallback, make, difference, device)


def compare_dense(one: DenseAttention, other: DenseAttention, geometry: Geometry, device: torch.device | str) -> float:
    """The largest difference between two kinds on normal numbers, with and without a prefix; waits for the device."""
    g, largest = geometry, 0.0
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(g.dtype)

    for new, total in ((70, 70), (33, 250), (1, 129)):
        q = normal(new, g.query_heads, g.head_dim)
        keys, values = normal(2, g.kv_heads, total, g.head_dim)
        outs = []
        for each in (one, other):
            outs.append(torch.empty_like(q))
            each(q, keys, values, scale=g.head_dim**-0.5, out=outs[-1])
        largest = max(largest, float((outs[0].float() - outs[1].float()).abs().max()))
    return largest
