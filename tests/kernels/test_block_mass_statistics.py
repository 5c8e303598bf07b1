import pytest
import torch
from factories import DTYPES, make_paged_case, poisoned
from mass_cases import common_arguments, mass_output, over_dtypes, over_impls, over_shapes, ragged_case, tolerance
from oracles import exact_mass, expected_mass, statistics_mass
from sparse_kernels import STATISTICS_OF_KIND, block_mass_statistics, block_statistics

over_kinds = pytest.mark.parametrize("kind", STATISTICS_OF_KIND)


def summarise(case, kind):
    """Statistics of the closed pages; NaN elsewhere."""
    statistics = poisoned(
        case.num_pages,
        case.num_kv_heads,
        case.page_size // case.block_size,
        STATISTICS_OF_KIND[kind],
        case.head_dim,
        dtype=case.k_pool.dtype,
    )
    sizes = {"page_size": case.page_size, "block_size": case.block_size}
    block_statistics(case.k_pool, case.closed_pages(), kind=kind, **sizes, out=statistics)
    return statistics


def estimate(case, statistics, kind, impl="auto", **changes):
    out = mass_output(case)
    arguments = common_arguments(case, **changes)
    block_mass_statistics(
        case.q, case.k_pool, statistics, case.page_table, case.seq_lens, kind=kind, **arguments, out=out, impl=impl
    )
    return out


@over_impls
@over_kinds
@over_shapes
@over_dtypes
def test_estimates(impl, kind, page_size, block_size, head_dim, group_size, dtype):
    case = ragged_case(page_size, block_size, head_dim, group_size, dtype)
    statistics = summarise(case, kind)
    expected = expected_mass(case, lambda b: statistics_mass(case, b, statistics, kind), 0)
    # TF32 rounds the squared queries and the variances.
    native = 5e-3 if kind == "mean-variance" else 5e-4
    torch.testing.assert_close(estimate(case, statistics, kind, impl), expected, **tolerance(dtype, native))


@over_impls
@over_kinds
def test_rows_below_min_context_stay_untouched(impl, kind):
    case = ragged_case(16, 8, 64, 2, torch.float16)
    statistics = summarise(case, kind)
    expected = expected_mass(case, lambda b: statistics_mass(case, b, statistics, kind), 17)
    torch.testing.assert_close(
        estimate(case, statistics, kind, impl, min_context=17), expected, **tolerance(torch.float16, 5e-3)
    )


@over_impls
@over_kinds
def test_equal_keys_in_a_block_make_every_kind_exact(impl, kind):
    case = make_paged_case([48], dtype=DTYPES[0])
    first = case.slots(0).view(-1, case.block_size)
    case.k_pool[first] = case.k_pool[first[:, :1]]
    out = estimate(case, summarise(case, kind), kind, impl)
    torch.testing.assert_close(out[0, :, :, : case.blocks(0)], exact_mass(case, 0).float(), atol=2e-3, rtol=1e-4)


@over_impls
def test_bounds_hold(impl):
    case = make_paged_case([96], group_size=4)
    exact = exact_mass(case, 0).float()
    mean = estimate(case, summarise(case, "mean"), "mean", impl)[0, ..., : case.blocks(0)]
    upper = estimate(case, summarise(case, "minmax"), "minmax", impl)[0, ..., : case.blocks(0)]
    assert (mean <= exact + 1e-4).all()
    assert (mean < exact - 1e-2).any()
    assert (upper >= exact - 1e-4).all()
    assert (upper > exact + 1e-2).any()


@over_impls
def test_variance_improves_on_the_mean(impl):
    case = make_paged_case([128], group_size=4, page_size=32, block_size=32)
    exact = exact_mass(case, 0).float()

    def error(kind):
        return (estimate(case, summarise(case, kind), kind, impl)[0, ..., : case.blocks(0)] - exact).abs().mean()

    assert error("mean-variance") < 0.5 * error("mean")


@over_impls
@over_dtypes
def test_variances_that_square_out_of_half_precision(impl, dtype):
    """Queries whose squares overflow fp16 when the scale is small enough for the estimate to be finite."""
    case = make_paged_case([32], dtype=dtype)
    case.q *= 300
    statistics = summarise(case, "mean-variance")
    out = estimate(case, statistics, "mean-variance", impl, scale=1e-3)
    case.scale = 1e-3
    expected = statistics_mass(case, 0, statistics, "mean-variance").float()
    torch.testing.assert_close(out[0, ..., : case.blocks(0)], expected, atol=5e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "mvar"}, "kind is 'mvar'; allowed: mean, mean-variance, minmax"),
        ({"statistics": torch.zeros(2, 1, 2, 1, 64)}, r"statistics has shape .*; needed: \[\*, 1, 2, 2, 64\]"),
    ],
)
def test_refuses(change, message):
    arguments = {
        "q": torch.zeros(1, 2, 64),
        "k_pool": torch.zeros(32, 1, 64),
        "statistics": torch.zeros(2, 1, 2, 2, 64),
        "page_table": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.zeros(1, dtype=torch.int32),
        "out": torch.zeros(1, 1, 2, 8),
        "kind": "minmax",
        "scale": 1.0,
        "page_size": 16,
        "block_size": 8,
        "min_context": 0,
    }
    with pytest.raises(ValueError, match=message):
        block_mass_statistics(**(arguments | change))
