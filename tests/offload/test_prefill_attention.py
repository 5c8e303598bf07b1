"""Prefill attention by FlashAttention over the staging, beside torch's. On a CPU its functions are stood in for."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from sglang_sparse.geometry import Geometry
from sglang_sparse.offload.prefill_attention import FlashAttention, TorchAttention, choose, compare, paged_views

GEOMETRIES = [
    Geometry(kv_heads=2, group_size=3, head_dim=64, dtype=torch.float32, page_size=32, block_size=16),
    Geometry(kv_heads=1, group_size=1, head_dim=96, dtype=torch.float32, page_size=16, block_size=16),
    Geometry(kv_heads=4, group_size=2, head_dim=64, dtype=torch.float32, page_size=64, block_size=8),
]
CPU = torch.device("cpu")


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> Any:
    """Output `[T, Hq, D]` and log-sum-exp `[Hq, T]`; without keys undefined, as they may be."""
    if not len(k):
        return torch.full_like(q, float("nan")), torch.full((q.shape[1], len(q)), float("inf"))
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for each in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * scale
    if causal:
        scores += torch.full(scores.shape[1:], float("-inf"), dtype=scores.dtype).triu(1 + len(k) - len(q))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).to(q.dtype), scores.logsumexp(-1).float()


def varlen(*, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, softmax_scale: float, **more: Any) -> Any:
    assert more.pop("causal") is True
    starts = cu_seqlens_q.tolist()
    assert starts == cu_seqlens_k.tolist()
    longest = max(end - start for start, end in itertools.pairwise(starts))
    assert more.pop("max_seqlen_q") == more.pop("max_seqlen_k") == longest
    with_lse = more.pop("return_softmax_lse")
    assert not more
    parts = [
        softmax_attention(q[start:end], k[start:end], v[start:end], softmax_scale, True)
        for start, end in itertools.pairwise(starts)
    ]
    out = torch.cat([part[0] for part in parts])
    return (out, torch.cat([part[1] for part in parts], 1)) if with_lse else out


def with_kvcache(*, q: Any, k_cache: Any, v_cache: Any, page_table: Any, cache_seqlens: Any, **more: Any) -> Any:
    assert more.pop("causal") is False
    assert more.pop("return_softmax_lse") is True
    scale, starts = more.pop("softmax_scale"), more.pop("cu_seqlens_q").tolist()
    assert more.pop("max_seqlen_q") == max(end - start for start, end in itertools.pairwise(starts))
    assert not more
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    assert int(page_table.max()) < len(k_cache)
    size, parts = k_cache.shape[1], []
    for table, length, start, end in zip(page_table, cache_seqlens.tolist(), starts, starts[1:], strict=False):
        own = table[: -(-length // size)].long()
        k, v = k_cache[own].flatten(0, 1)[:length], v_cache[own].flatten(0, 1)[:length]
        parts.append(softmax_attention(q[start:end], k, v, scale, False))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], 1)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_flash_attention_over_the_staging_equals_torch(geometry: Geometry) -> None:
    flash = FlashAttention(geometry, with_kvcache, varlen)
    assert compare(flash, TorchAttention(geometry), geometry, CPU) < 1e-5


def test_without_prefixes_there_is_one_attention() -> None:
    g, calls = GEOMETRIES[0], []

    def counted(**arguments: Any) -> Any:
        calls.append(arguments)
        return varlen(**arguments)

    flash = FlashAttention(g, lambda **_: pytest.fail("there is nothing cached"), counted)
    q, k, v = (torch.randn(9, heads, g.head_dim) for heads in (g.query_heads, g.kv_heads, g.kv_heads))
    out, expected = torch.empty_like(q), torch.empty_like(q)
    for attention, result in ((flash, out), (TorchAttention(g), expected)):
        attention.begin([0, 0], [4, 5], CPU)
        attention.attend(q, k, v, torch.full((2, 2, 2, 2, 16, 64), float("nan")), scale=0.1, out=result)
    torch.testing.assert_close(out, expected)
    assert len(calls) == 1


def test_views_of_the_staging_name_every_block_and_stay_inside() -> None:
    staging = torch.arange(3 * 2 * 4 * 2 * 8 * 5).view(3, 2, 4, 2, 8, 5)
    two = torch.stack((torch.zeros_like(staging), staging))[1]
    keys, values = paged_views(two)
    for page in range(3):
        for i in range(4):
            unit = page * 2 * 4 + i
            assert torch.equal(keys[unit], staging[page, :, i, 0].transpose(0, 1))
            assert torch.equal(values[unit], staging[page, :, i, 1].transpose(0, 1))
    assert len(keys) == 2 * 2 * 4 + 4
    assert int(values[-1].max()) == staging.numel() - 1


def test_a_cpu_has_torch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert isinstance(choose(GEOMETRIES[0], "cpu", "fa3"), TorchAttention)
    assert caplog.messages == ["Prefill attention by torch."]


def test_what_cannot_be_imported_is_told_and_torch_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    geometry = Geometry(kv_heads=2, group_size=1, head_dim=64, dtype=torch.bfloat16, page_size=32, block_size=16)
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", None)  # type: ignore[arg-type]
    with caplog.at_level("INFO"):
        assert isinstance(choose(geometry, "cuda", "fa3"), TorchAttention)
        assert isinstance(choose(geometry, "cuda", "triton"), TorchAttention)
    first, second, third, _ = caplog.messages
    assert "No FlashAttention 3 for prefill (ModuleNotFoundError: import of sgl_kernel.flash_attn halted" in first
    assert second == "Prefill attention by torch."
    assert "the prefill backend is triton, not fa3" in third


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash_attention_3_is_chosen_and_equals_torch(head_dim: int) -> None:
    pytest.importorskip("sgl_kernel.flash_attn")
    geometry = Geometry(kv_heads=8, group_size=4, head_dim=head_dim, dtype=torch.bfloat16, page_size=64, block_size=16)
    chosen = choose(geometry, "cuda", "fa3")
    assert isinstance(chosen, FlashAttention), "it is not there, or differs: see the log"
    for seed_pages in range(3):
        prefix_pages, extends = [seed_pages, 5, 0, 17], [200, 1, 640, 63 + seed_pages]
        staging = torch.randn((sum(prefix_pages), 8, 4, 2, 16, head_dim), device="cuda").bfloat16()
        q, k, v = (torch.randn((sum(extends), heads, head_dim), device="cuda").bfloat16() for heads in (32, 8, 8))
        out, expected = torch.empty_like(q), torch.empty_like(q)
        for attention, result in ((chosen, out), (TorchAttention(geometry), expected)):
            attention.begin([pages * 64 for pages in prefix_pages], extends, torch.device("cuda"))
            attention.attend(q, k, v, staging, scale=head_dim**-0.5, out=result)
        torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
