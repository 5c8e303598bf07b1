import pytest
import torch
from factories import DTYPES, make_paged_case, poisoned
from sparse_kernels import STATISTICS_OF_KIND, block_statistics

IMPLS = ["torch", "triton"]
SHAPES = [(16, 8, 64), (32, 16, 96), (64, 64, 128), (128, 32, 256)]
"""(page_size, block_size, head_dim)"""


def brute_force(k_pool, pages, kind, page_size, block_size, out):
    for page in pages:
        for j in range(page_size // block_size):
            start = page * page_size + j * block_size
            keys = k_pool[start : start + block_size].double()
            if kind == "minmax":
                values = [keys.min(0).values, keys.max(0).values]
            else:
                mean = keys.mean(0)
                values = [mean, ((keys - mean) ** 2).mean(0)]
            for s in range(STATISTICS_OF_KIND[kind]):
                out[page, :, j, s] = values[s].to(out.dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", STATISTICS_OF_KIND)
@pytest.mark.parametrize(("page_size", "block_size", "head_dim"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics(impl, kind, page_size, block_size, head_dim, dtype, device):
    case = make_paged_case(
        [2 * page_size, page_size + 1],
        head_dim=head_dim,
        page_size=page_size,
        block_size=block_size,
        dtype=dtype,
        key_bias=5.0,
    )
    pages = case.closed_pages().tolist()
    shape = (case.num_pages, case.num_kv_heads, page_size // block_size, STATISTICS_OF_KIND[kind], head_dim)
    out = poisoned(*shape, dtype=dtype)
    expected = out.clone()
    brute_force(case.k_pool, pages, kind, page_size, block_size, expected)
    listed = torch.tensor([pages[0], -1, *pages[1:], -1], device=device)
    block_statistics(case.k_pool, listed, kind=kind, page_size=page_size, block_size=block_size, out=out, impl=impl)
    if kind == "minmax":
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    else:
        # fp32 accumulation around a mean of about 5, then one rounding to the KV dtype.
        epsilon = torch.finfo(dtype).eps
        torch.testing.assert_close(out, expected, rtol=epsilon, atol=max(epsilon * 1e-2, 1e-5), equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_summaries_of_other_pages_than_the_pools(impl, device):
    """Pages of a small pool are summarised as pages of a large one; what names none is not followed."""
    k_pool = torch.randn(4 * 16, 2, 64, device=device)
    plain, moved = poisoned(4, 2, 2, 2, 64), poisoned(50, 2, 2, 2, 64)
    sizes = {"kind": "minmax", "page_size": 16, "block_size": 8, "impl": impl}
    pages = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    targets = torch.tensor([31, 2**30, 49], device=device)
    block_statistics(k_pool, pages, out=plain, **sizes)
    block_statistics(k_pool, pages, out=moved, targets=targets, **sizes)
    assert torch.equal(moved[[31, 49]], plain[[2, 0]])
    assert (moved.flatten(1).isnan().all(1).nonzero().flatten().tolist()) == [p for p in range(50) if p not in (31, 49)]


@pytest.mark.parametrize("impl", IMPLS)
def test_no_pages_writes_nothing(impl, device):
    k_pool = torch.randn(32, 1, 64, device=device)
    out = poisoned(2, 1, 2, 1, 64)
    for pages in ([], [-1, -1, -1]):
        listed = torch.tensor(pages, dtype=torch.int32, device=device)
        block_statistics(k_pool, listed, kind="mean", page_size=16, block_size=8, out=out, impl=impl)
    assert out.isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_pool(impl, device):
    pool = torch.randn(32, 2, 3, 64, device=device)
    out, expected = poisoned(2, 3, 2, 1, 64), poisoned(2, 3, 2, 1, 64)
    pages = torch.tensor([1], device=device)
    block_statistics(pool[:, 1], pages, kind="mean", page_size=16, block_size=8, out=out, impl=impl)
    brute_force(pool[:, 1], [1], "mean", 16, 8, expected)
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "median"}, "kind is 'median'; allowed: mean, mean-variance, minmax"),
        ({"block_size": 32}, "block_size is 32; needed: a divisor of page_size=16"),
        ({"out": torch.zeros(2, 1, 2, 2, 64)}, r"out has shape \[2, 1, 2, 2, 64\]; needed: \[2, 1, 2, 1, 64\]"),
        ({"out": torch.zeros(2, 1, 2, 1, 64, dtype=torch.float16)}, "out has dtype torch.float16"),
    ],
)
def test_refuses(change, message):
    arguments = {"kind": "mean", "page_size": 16, "block_size": 8, "out": torch.zeros(2, 1, 2, 1, 64)}
    with pytest.raises(ValueError, match=message):
        block_statistics(torch.zeros(32, 1, 64), torch.zeros(1, dtype=torch.int32), **(arguments | change))
