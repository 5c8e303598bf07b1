import pytest
import torch
from factories import DTYPES, PagedCase, make_paged_case, poisoned
from mass_cases import common_arguments, mass_output, over_impls, tolerance
from sparse_kernels import block_score_strided, block_statistics

STRIDE, WINDOW = 16, 32

HALF, OTHER = DTYPES
over_shapes = pytest.mark.parametrize(
    ("page_size", "block_size", "head_dim", "group_size", "dtype"),
    [
        *((16, 16, 64, 1, HALF), (32, 16, 96, 3, OTHER), (64, 64, 128, 1, HALF), (64, 32, 96, 7, OTHER)),
        (128, 64, 256, 4, HALF),
    ],
)


def ragged_case(page_size, block_size, head_dim, group_size, dtype) -> PagedCase:
    """Rows of no, one, a few and many closed pages, on a page's border and beside it, and a padded row."""
    lengths = [1, page_size - 1, page_size, 0, 2 * page_size + 5, 3 * page_size, 600 + page_size // 2]
    sizes = {"head_dim": head_dim, "group_size": group_size, "page_size": page_size, "block_size": block_size}
    return make_paged_case(lengths, **sizes, dtype=dtype, shared_pages=1)


def summarise(case: PagedCase) -> torch.Tensor:
    """Means of the closed pages; NaN elsewhere."""
    shape = (case.num_pages, case.num_kv_heads, case.page_size // STRIDE, 1, case.head_dim)
    means = poisoned(*shape, dtype=case.k_pool.dtype)
    sizes = {"page_size": case.page_size, "block_size": STRIDE}
    block_statistics(case.k_pool, case.closed_pages(), kind="mean", **sizes, out=means)
    return means


def score(case: PagedCase, means: torch.Tensor, impl: str = "auto", **changes) -> torch.Tensor:
    out = mass_output(case)
    inputs = (case.q, means, case.page_table, case.seq_lens)
    block_score_strided(*inputs, **common_arguments(case, **changes), out=out, impl=impl)
    return out


def expected_scores(case: PagedCase, min_context: int = 0) -> torch.Tensor:
    """By the definition: the mean of 32 keys, window by window; NaN where nothing is written."""
    out = mass_output(case)
    for b, length in enumerate(case.lengths):
        if length == 0 or length < min_context:
            continue
        closed = length // case.page_size * case.page_size
        out[b, :, :, : case.blocks(b)] = float("-inf")
        keys = case.keys(b).double()
        for start in range(0, closed - WINDOW + 1, STRIDE):
            mean = keys[start : start + WINDOW].mean(0)
            for h in range(case.num_kv_heads):
                for g in range(case.group_size):
                    value = float(case.q[b, h * case.group_size + g].double() @ mean[h]) * case.scale
                    for block in range(start // case.block_size, (start + WINDOW - 1) // case.block_size + 1):
                        out[b, h, g, block] = max(float(out[b, h, g, block]), value)
    return out


@over_impls
@over_shapes
def test_scores(impl, page_size, block_size, head_dim, group_size, dtype):
    case = ragged_case(page_size, block_size, head_dim, group_size, dtype)
    # Means are rounded to the pool's dtype.
    limits = tolerance(dtype, 5e-3) | ({} if dtype == torch.float32 else {"atol": 5e-3})
    torch.testing.assert_close(score(case, summarise(case), impl), expected_scores(case), **limits)


@over_impls
def test_rows_below_min_context_stay_untouched(impl):
    case = ragged_case(16, 16, 64, 2, torch.float32)
    out = score(case, summarise(case), impl, min_context=17)
    torch.testing.assert_close(out, expected_scores(case, 17), **tolerance(torch.float32, 0))


@over_impls
def test_a_window_across_pages_counts_for_both(impl):
    """The keys around the border of two pages stand out: their blocks score alike, and above all others."""
    case = make_paged_case([320], group_size=1, page_size=64, block_size=64)
    border = case.slots(0)[112:144]
    case.k_pool[case.slots(0)] = 0
    case.k_pool[border] = case.q[0].view(1, case.num_kv_heads, -1)
    found = score(case, summarise(case), impl)[0, :, 0, :5]
    full = (case.q[0].double() ** 2).sum(-1) * case.scale
    torch.testing.assert_close(found[:, 1].double(), full, atol=1e-3, rtol=1e-4)
    assert torch.equal(found[:, 1], found[:, 2])
    assert (found[:, [0, 3, 4]] < found[:, 1:2]).all()


@over_impls
def test_what_is_no_number_is_above_everything(impl):
    case = make_paged_case([200], dtype=DTYPES[0], page_size=32, block_size=32)
    means = summarise(case)
    means[case.page_table[0, 2].long(), 1, 1] = float("nan")
    found = score(case, means, impl)[0]
    assert torch.isfinite(found[0, :, :6]).all()
    assert found[1, :, :6].isinf().any(0).tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 8}, "block_size is 8; needed: a multiple of 16"),
        ({"means": torch.zeros(2, 1, 2, 1, 64)}, r"means has shape .*; needed: \[\*, 1, 4, 1, 64\]"),
        ({"q": torch.zeros(1, 3, 64)}, r"q has shape .*; needed: \[1, 2, \*\]"),
    ],
)
def test_refuses(change, message):
    arguments = {
        "q": torch.zeros(1, 2, 64),
        "means": torch.zeros(2, 1, 4, 1, 64),
        "page_table": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.zeros(1, dtype=torch.int32),
        "out": torch.zeros(1, 1, 2, 8),
        "scale": 1.0,
        "page_size": 64,
        "block_size": 16,
        "min_context": 0,
    }
    with pytest.raises(ValueError, match=message):
        block_score_strided(**(arguments | change))
