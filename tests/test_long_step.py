"""Far beyond 20,000 tokens a decode step finds what dense attention finds: one token among all of them."""

from __future__ import annotations

import pytest
import torch
from test_poisoned_step import kernels

from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GEOMETRY = Geometry(kv_heads=1, group_size=2, head_dim=64, dtype=torch.float32, page_size=128, block_size=64)
LENGTH, SCALE = 40_001, 0.125
NEEDLES = (3, 20_479, 20_480, 32_768, LENGTH - 1)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


def attend(needles: tuple[int, ...], **changes: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step of one request for each needle, over the same keys: its output, dense attention, and blocks read."""
    pages, batch = -(-LENGTH // 128), len(needles)
    options = SparseDecodeOptions(**{"min_context": 0, "sink_tokens": 0, "window_tokens": 1, **changes})
    step = DecodeStep(options, GEOMETRY, layers=1, pages=pages + 1, max_requests=batch, max_pages=pages, device=DEVICE)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(pages, generator=generator) + 1
    slots = (order[:, None] * 128 + torch.arange(128)).flatten()
    k, v = (torch.randn(LENGTH, 1, 64, generator=generator) for _ in range(2))
    k_pool, v_pool = torch.full((2, (pages + 1) * 128, 1, 64), float("nan"), device=DEVICE)
    k_pool[slots[:LENGTH].to(DEVICE)], v_pool[slots[:LENGTH].to(DEVICE)] = k.to(DEVICE), v.to(DEVICE)
    step.summaries.update(0, k_pool, v_pool, order[: LENGTH // 128].to(DEVICE))
    # Each query is three times the needle's own key: its score is 24 or so, the others' have a deviation of 3.
    q = torch.stack([k[needle] * 3 for needle in needles]).repeat(1, 2, 1)
    table = slots[None].int().repeat(batch, 1).to(DEVICE)
    step.buffers.load(table, torch.arange(batch, device=DEVICE), torch.full((batch,), LENGTH, device=DEVICE))
    out = torch.full_like(q, float("nan"), device=DEVICE)
    step.attend(0, q.to(DEVICE), k_pool, v_pool, scale=SCALE, out=out)
    dense = torch.softmax(q.double() @ k[:, 0].double().T * SCALE, -1) @ v[:, 0].double()
    return out.double().cpu(), dense, step.buffers.request_totals.cpu()


# Rule top-delta measures from the forced blocks' largest score, and so keeps most where the needle is in none of them.
CHOICES = [({"gamma": 0.95}, 0.1), ({"rule": "top-delta", "delta": 7.0}, 1), ({"rule": "top-k", "top_k": 8}, 0.1)]


@pytest.mark.parametrize(("changes", "share"), CHOICES, ids=str)
def test_one_token_is_found_wherever_it_is(changes: dict, share: float) -> None:
    out, dense, totals = attend(NEEDLES, **changes)
    torch.testing.assert_close(out, dense, atol=0.05, rtol=0)
    assert (totals[:, 0] <= share * totals[:, 1]).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="the test above runs the kernels there")
def test_the_kernels_find_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels(monkeypatch)
    out, dense, totals = attend((20_480,), gamma=0.95)
    torch.testing.assert_close(out, dense, atol=0.05, rtol=0)
    assert totals[0, 0] < 0.1 * totals[0, 1]
