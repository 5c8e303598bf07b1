"""Dense attention of prefill by FlashAttention 3, beside torch's. On a CPU its function is stood in for."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from sglang_sparse.dense_attention import FlashDense, TorchDense, choose_dense, compare_dense
from sglang_sparse.geometry import Geometry

GEOMETRY = Geometry(kv_heads=2, group_size=3, head_dim=64, dtype=torch.float32, page_size=32, block_size=16)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """`[n, Hq, D]` in float64: query `i` of `n` sees all but the last `n - 1 - i` of the keys `[t, Hkv, D]`."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.double().repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("nhd,thd->hnt", q.double(), k) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
    return torch.einsum("hnt,thd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def varlen(*, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **more: Any) -> torch.Tensor:
    """As FlashAttention's, for one request."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.tolist() == [0, len(q)]
    assert cu_seqlens_k.tolist() == [0, len(k)]
    assert q.is_contiguous()
    assert k.stride(-1) == v.stride(-1) == 1
    assert (more.pop("max_seqlen_q"), more.pop("max_seqlen_k")) == (len(q), len(k))
    assert more.pop("causal") is True
    scale = more.pop("softmax_scale")
    assert not more
    return attention(q, k, v, scale).to(q.dtype)


@pytest.mark.parametrize("kind", [TorchDense(), FlashDense(varlen)], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("new", "total"), [(1, 1), (1, 40), (17, 17), (17, 18), (33, 200)])
def test_the_last_query_sees_every_key(kind: Any, new: int, total: int) -> None:
    g = GEOMETRY
    # As parts of what one projection made: not contiguous.
    q = torch.randn(new, g.query_heads + 2, g.head_dim)[:, : g.query_heads]
    keys, values = torch.randn(2, g.kv_heads, total, g.head_dim)
    out = torch.full((new, g.query_heads, g.head_dim), float("nan"))
    kind(q, keys, values, scale=0.2, out=out)
    expected = attention(q, keys.transpose(0, 1), values.transpose(0, 1), 0.2)
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)


def test_a_difference_is_found() -> None:
    def late(**arguments: Any) -> torch.Tensor:
        """Aligned to the first key, as some versions of FlashAttention are."""
        arguments["k"], arguments["v"] = arguments["k"][: len(arguments["q"])], arguments["v"][: len(arguments["q"])]
        return attention(arguments["q"], arguments["k"], arguments["v"], arguments["softmax_scale"])

    assert compare_dense(FlashDense(varlen), TorchDense(), GEOMETRY, "cpu") < 1e-5
    assert compare_dense(FlashDense(late), TorchDense(), GEOMETRY, "cpu") > 0.1


def test_what_is_not_there_or_does_not_fit_is_told_and_torch_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    geometry = Geometry(kv_heads=2, group_size=1, head_dim=64, dtype=torch.bfloat16, page_size=32, block_size=16)
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", None)  # type: ignore[arg-type]
    with caplog.at_level("INFO"):
        assert isinstance(choose_dense(geometry, "cpu", "fa3"), TorchDense)
        assert isinstance(choose_dense(geometry, "cuda", "fa3"), TorchDense)
        assert isinstance(choose_dense(geometry, "cuda", "triton"), TorchDense)
        assert isinstance(choose_dense(GEOMETRY, "cuda", "fa3"), TorchDense)
    quiet, missing, _, other, _, full, last = caplog.messages
    assert quiet == last == "Prefill attention by torch."
    assert "No FlashAttention 3 for prefill (ModuleNotFoundError: import of sgl_kernel.flash_attn halted" in missing
    assert "the prefill backend is triton, not fa3" in other
    assert "the model is of torch.float32" in full


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash_attention_3_is_chosen_and_equals_torch(head_dim: int) -> None:
    pytest.importorskip("sgl_kernel.flash_attn")
    geometry = Geometry(kv_heads=8, group_size=4, head_dim=head_dim, dtype=torch.bfloat16, page_size=64, block_size=16)
    chosen = choose_dense(geometry, "cuda", "fa3")
    assert isinstance(chosen, FlashDense), "it is not there, or differs: see the log"
    for new, total in ((1, 5000), (700, 700), (512, 8192)):
        q = torch.randn((new, 32, head_dim), device="cuda").bfloat16()
        keys, values = torch.randn((2, 8, total, head_dim), device="cuda").bfloat16()
        out = torch.empty_like(q)
        chosen(q, keys, values, scale=head_dim**-0.5, out=out)
        expected = attention(q, keys.transpose(0, 1), values.transpose(0, 1), head_dim**-0.5)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
