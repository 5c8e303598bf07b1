"""Prefill over split prefixes, beside dense attention in float64."""

from __future__ import annotations

import pytest
import torch
from sparse_kernels.split_keys import reconstruct

from sglang_sparse.dense_prefill import PrefillBatch
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.split import prefill
from sglang_sparse.split.decode import SplitDecode
from sglang_sparse.split.prefill import SplitPrefill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
GEOMETRY = Geometry(kv_heads=2, group_size=3, head_dim=64, dtype=DTYPE, page_size=32, block_size=16)
LAYERS, PAGES, SCALE = 3, 40, 0.125


class Pools:
    """A split cache and its prefill, and plain pools beside them."""

    def __init__(self, staging_tokens: int = 256) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(2)
        shape = (PAGES * GEOMETRY.page_size, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.decode = SplitDecode(
            SparseDecodeOptions(kv_format="split"),
            GEOMETRY,
            values=[torch.full(shape, float("nan"), dtype=DTYPE, device=DEVICE) for _ in range(LAYERS)],
            rows=5,
            max_requests=5,
            max_pages=16,
            device=DEVICE,
        )
        self.prefill = SplitPrefill(self.decode, staging_tokens=staging_tokens)
        self.prefill._staging.fill_(float("nan"))
        self.k, self.v = (torch.full((LAYERS, *shape), float("nan"), dtype=DTYPE, device=DEVICE) for _ in range(2))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE).to(DTYPE)

    def run(self, pages: list[list[int]], prefixes: list[int], extends: list[int]) -> None:
        """One batch through all layers; compares each layer's output and what is stored."""
        table = torch.full((len(pages), 16), 2**30, dtype=torch.int32)
        for r, own in enumerate(pages):
            table[r, : len(own)] = torch.tensor(own)
        rows = torch.arange(1, len(pages) + 1, device=DEVICE)
        batch = PrefillBatch(table.to(DEVICE), prefixes, extends, rows)
        places, _ = batch.places(GEOMETRY.page_size)
        self.prefill.begin(batch)
        for layer in range(LAYERS):
            q = self.normal(sum(extends), GEOMETRY.query_heads, GEOMETRY.head_dim)
            k, v = (self.normal(sum(extends), GEOMETRY.kv_heads, GEOMETRY.head_dim) for _ in range(2))
            self.k[layer, places], self.v[layer, places] = k, v
            out = torch.full_like(q, float("nan"))
            self.prefill.attend(layer, q, k, v, scale=SCALE, out=out)
            expected = self.expected(layer, q, pages, prefixes, extends)
            tolerance = 2e-2 if DEVICE == "cuda" else 1e-5
            torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
            self.check(layer, pages, [p + e for p, e in zip(prefixes, extends, strict=True)])
        self.prefill.end()

    def expected(
        self, layer: int, q: torch.Tensor, pages: list[list[int]], prefixes: list[int], extends: list[int]
    ) -> torch.Tensor:
        page, first, parts = GEOMETRY.page_size, 0, []
        for own, prefix, extend in zip(pages, prefixes, extends, strict=True):
            slots = (torch.tensor(own)[:, None] * page + torch.arange(page)).flatten()[: prefix + extend].to(DEVICE)
            k, v = self.k[layer, slots].double(), self.v[layer, slots].double()
            full = torch.tensor(own[: (prefix + extend) // page], dtype=torch.int64, device=DEVICE)
            kept = reconstruct(*(tensor[full] for tensor in self.decode.summaries[layer]))
            k[: len(full) * page] = kept.transpose(1, 2).flatten(0, 1).double()
            k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
            scores = torch.einsum("thd,shd->hts", q[first : first + extend].double(), k) * SCALE
            position = torch.arange(prefix + extend, device=DEVICE)
            scores.masked_fill_(position > position[prefix:, None], float("-inf"))
            parts.append(torch.einsum("hts,shd->thd", scores.softmax(-1), v))
            first += extend
        return torch.cat(parts)

    def check(self, layer: int, pages: list[list[int]], lengths: list[int]) -> None:
        page = GEOMETRY.page_size
        for r, (own, length) in enumerate(zip(pages, lengths, strict=True)):
            closed = torch.tensor(own[: length // page], dtype=torch.int64, device=DEVICE)
            assert self.decode.summaries.stale_pages(layer, self.k[layer], self.v[layer], closed) == 0
            slots = (torch.tensor(own)[:, None] * page + torch.arange(page)).flatten()[:length].to(DEVICE)
            assert torch.equal(self.decode.values[layer][slots], self.v[layer, slots])
            opened = length % page
            row = slice((r + 1) * page, (r + 1) * page + opened)
            assert torch.equal(self.decode.open_keys[layer, row], self.k[layer, slots[length - opened :]])


@pytest.mark.parametrize("pages_at_once", [1, 3, 256])
def test_chunks_prefixes_and_batches(pages_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PAGES_AT_ONCE", pages_at_once)
    pools = Pools()
    first = [3, 17, 9, 30, 5]
    pools.run([first], [0], [64])
    # The next chunk of the same request, and one without a prefix; both leave a page open.
    pools.run([first, [20, 21]], [64, 0], [71, 33])
    # Two requests on one prefix, one of them with a single token, and one that ends with its page.
    pools.run([[*first[:4], 11], [*first[:2], 12, 13], [14]], [128, 64, 0], [1, 40, 32])


def test_what_a_token_is_given_does_not_depend_on_where_chunks_end() -> None:
    pools, generator = Pools(), torch.Generator(DEVICE).manual_seed(5)
    page, length = GEOMETRY.page_size, 5 * GEOMETRY.page_size + 7

    def normal(heads: int) -> torch.Tensor:
        return torch.randn((length, heads, GEOMETRY.head_dim), generator=generator, device=DEVICE).to(DTYPE)

    # Far from each other, so that a rounded key is far from the key.
    q, k, v = normal(GEOMETRY.query_heads), 30 * normal(GEOMETRY.kv_heads), normal(GEOMETRY.kv_heads)
    table = torch.tensor([[3, 17, 9, 30, 5, 11]], dtype=torch.int32, device=DEVICE)

    def attended(*chunks: int) -> torch.Tensor:
        parts, first = [], 0
        for tokens in chunks:
            pools.prefill.begin(PrefillBatch(table, [first], [tokens], torch.ones(1, dtype=torch.int64, device=DEVICE)))
            own = slice(first, first + tokens)
            out = torch.full_like(q[own], float("nan"))
            pools.prefill.attend(0, q[own], k[own], v[own], scale=SCALE, out=out)
            pools.prefill.end()
            parts.append(out)
            first += tokens
        assert first == length
        return torch.cat(parts)

    whole = attended(length)
    tolerance = 2e-2 if DEVICE == "cuda" else 1e-4
    for chunks in ((page, length - page), (3 * page, page, page + 7), (5 * page, 7)):
        torch.testing.assert_close(attended(*chunks), whole, rtol=tolerance, atol=tolerance)


def test_refuses_a_prefix_within_a_page_and_a_request_beyond_the_staging() -> None:
    pools = Pools(staging_tokens=64)
    table = torch.ones((1, 16), dtype=torch.int32, device=DEVICE)
    rows = torch.ones(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"prefix lengths are \[40\]; needed: multiples of page_size=32"):
        pools.prefill.begin(PrefillBatch(table, [40], [1], rows))
    with pytest.raises(ValueError, match="a request of 65 tokens exceeds the staging of 64"):
        pools.prefill.begin(PrefillBatch(table, [64], [1], rows))
