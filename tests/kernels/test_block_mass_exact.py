import pytest
import torch
from factories import make_paged_case
from mass_cases import common_arguments, mass_output, over_dtypes, over_impls, over_shapes, ragged_case, tolerance
from oracles import exact_mass, expected_mass, expected_maxima
from sparse_kernels import _score_tile, block_mass_exact


def check(case, impl, **changes):
    out = mass_output(case)
    arguments = common_arguments(case, **changes)
    block_mass_exact(case.q, case.k_pool, case.page_table, case.seq_lens, **arguments, out=out, impl=impl)
    per_page = case.page_size // case.block_size
    expected = expected_mass(
        case,
        lambda b: exact_mass(case, b)[..., : case.lengths[b] // case.page_size * per_page],
        arguments["min_context"],
    )
    torch.testing.assert_close(out, expected, **tolerance(case.q.dtype, 5e-4))


@over_impls
@over_shapes
@over_dtypes
def test_exact(impl, page_size, block_size, head_dim, group_size, dtype):
    check(ragged_case(page_size, block_size, head_dim, group_size, dtype), impl)


@over_impls
@over_dtypes
def test_largest_scores(impl, dtype):
    case = ragged_case(32, 16, 64, 3, dtype)
    out, maxima = mass_output(case), mass_output(case)
    arguments = common_arguments(case, min_context=17)
    block_mass_exact(
        case.q, case.k_pool, case.page_table, case.seq_lens, **arguments, out=out, block_max=maxima, impl=impl
    )
    check(case, impl, min_context=17)
    expected = expected_maxima(case, lambda b: case.keys(b).double(), 17)
    torch.testing.assert_close(maxima, expected, **tolerance(dtype, 5e-3))


@over_impls
def test_rows_below_min_context_stay_untouched(impl):
    case = ragged_case(16, 8, 64, 2, torch.float16)
    check(case, impl, min_context=16)
    check(case, impl, min_context=10**6)


@over_impls
@pytest.mark.parametrize("rows", [2, 4])
def test_more_requests_than_a_program_looks_at_in_one_step(impl, rows, monkeypatch):
    monkeypatch.setattr(_score_tile, "REQUESTS", rows)
    check(make_paged_case([5, 0, 33, 16, 1, 0, 40, 0, 17], dtype=torch.float16), impl)


@over_impls
def test_strided_pool_and_queries(impl):
    case = ragged_case(16, 8, 64, 3, torch.float16)
    case.k_pool = torch.stack((case.v_pool, case.k_pool), 1)[:, 1]
    case.q = torch.stack((case.q, case.q.flip(0)), 2)[:, :, 0]
    check(case, impl)


@over_impls
def test_empty_batch_rows_only(impl):
    check(make_paged_case([0, 0]), impl)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 24}, "page_size is 24; allowed: 16, 32, 64, 128"),
        ({"block_size": 64}, "block_size is 64; needed: a divisor of page_size=16"),
        ({"out": torch.zeros(1, 1, 3, 8)}, "out has shape"),
        ({"out": torch.zeros(1, 1, 2, 8, dtype=torch.float16)}, "out has dtype"),
        ({"q": torch.zeros(1, 2, 80)}, "q has shape"),
        ({"q": torch.zeros(1, 17, 64)}, "q has 17 heads for 1 KV heads"),
        ({"k_pool": torch.zeros(32, 1, 80)}, "head dimension of k_pool is 80; allowed: 64, 96, 128, 256"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int64)}, "seq_lens has dtype torch.int64; allowed: torch.int32"),
    ],
)
def test_refuses(change, message):
    arguments = {
        "q": torch.zeros(1, 2, 64),
        "k_pool": torch.zeros(32, 1, 64),
        "page_table": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.zeros(1, dtype=torch.int32),
        "out": torch.zeros(1, 1, 2, 8),
        "scale": 1.0,
        "page_size": 16,
        "block_size": 8,
        "min_context": 0,
    }
    with pytest.raises(ValueError, match=message):
        block_mass_exact(**(arguments | change))


def test_triton_on_cpu_needs_the_interpreter(monkeypatch):
    from sparse_kernels import _dispatch

    monkeypatch.setattr(_dispatch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        _dispatch.use_triton("triton", torch.zeros(1))
