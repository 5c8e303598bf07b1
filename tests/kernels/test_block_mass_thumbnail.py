import pytest
import torch
from factories import make_paged_case, poisoned
from mass_cases import common_arguments, mass_output, over_dtypes, over_impls, over_shapes, ragged_case, tolerance
from oracles import dequantised, exact_mass, expected_mass, expected_maxima, token_mass
from sparse_kernels import block_mass_thumbnail, thumbnail

over_bits = pytest.mark.parametrize("bits", [2, 3, 4])


def summarise(case, bits):
    """Thumbnails of the closed pages; poison elsewhere."""
    page_bytes = case.head_dim * bits // 8
    codes = poisoned(case.num_pages, case.num_kv_heads, case.page_size, page_bytes, dtype=torch.uint8)
    low_step = poisoned(case.num_pages, case.num_kv_heads, 2, case.head_dim, dtype=torch.bfloat16)
    pages = case.closed_pages()
    thumbnail(case.k_pool, pages, bits=bits, page_size=case.page_size, codes=codes, low_step=low_step)
    return codes, low_step


def estimate(case, thumbnails, bits, impl, **changes):
    out = mass_output(case)
    arguments = common_arguments(case, **changes)
    block_mass_thumbnail(
        case.q, case.k_pool, *thumbnails, case.page_table, case.seq_lens, bits=bits, **arguments, out=out, impl=impl
    )
    return out


def brute_force(case, thumbnails, bits, min_context=0):
    def closed_mass(b):
        pages = case.page_table[b, : case.lengths[b] // case.page_size].long()
        keys = dequantised(thumbnails[0][pages], thumbnails[1][pages], bits, case.head_dim)
        return token_mass(case, b, keys.transpose(1, 2).flatten(0, 1), 0)

    return expected_mass(case, closed_mass, min_context)


@over_impls
@over_bits
@over_shapes
@over_dtypes
def test_estimates(impl, bits, page_size, block_size, head_dim, group_size, dtype):
    case = ragged_case(page_size, block_size, head_dim, group_size, dtype)
    thumbnails = summarise(case, bits)
    out = estimate(case, thumbnails, bits, impl)
    # Natively the query with the step folded in is rounded to bfloat16: 2**-9 of each product with a code of up to 15.
    torch.testing.assert_close(out, brute_force(case, thumbnails, bits), **tolerance(dtype, 6e-2))


@over_impls
@over_bits
@over_dtypes
def test_largest_scores(impl, bits, dtype):
    case = ragged_case(32, 16, 64, 3, dtype)
    thumbnails = summarise(case, bits)
    maxima = mass_output(case)
    out = estimate(case, thumbnails, bits, impl, min_context=17, block_max=maxima)
    torch.testing.assert_close(out, brute_force(case, thumbnails, bits, 17), **tolerance(dtype, 6e-2))

    def keys(b):
        closed = case.lengths[b] // case.page_size
        pages = case.page_table[b, :closed].long()
        estimated = dequantised(thumbnails[0][pages], thumbnails[1][pages], bits, case.head_dim)
        return torch.cat((estimated.transpose(1, 2).flatten(0, 1), case.keys(b)[closed * case.page_size :].double()))

    torch.testing.assert_close(maxima, expected_maxima(case, keys, 17), **tolerance(dtype, 6e-2))


@over_impls
@over_bits
def test_rows_below_min_context_stay_untouched(impl, bits):
    case = ragged_case(16, 8, 64, 2, torch.float16)
    thumbnails = summarise(case, bits)
    out = estimate(case, thumbnails, bits, impl, min_context=17)
    torch.testing.assert_close(out, brute_force(case, thumbnails, bits, 17), **tolerance(torch.float16, 6e-2))


@over_impls
@over_dtypes
@pytest.mark.parametrize(("bits", "error"), [(2, 1.0), (3, 0.5), (4, 0.25)])
@pytest.mark.parametrize("key_bias", [0.0, 100.0])
def test_close_to_exact_whatever_the_bias(impl, dtype, bits, error, key_bias):
    case = make_paged_case([128], group_size=4, page_size=32, block_size=16, dtype=dtype, key_bias=key_bias)
    # A constant key bias adds one constant to all of a head's scores: compare the shares.
    estimated = estimate(case, summarise(case, bits), bits, impl)[0, :, :, :8].double().log_softmax(-1)
    exact = exact_mass(case, 0).log_softmax(-1)
    assert (estimated - exact).abs().max() < error


@over_impls
@over_dtypes
def test_large_keys_and_queries_do_not_overflow(impl, dtype):
    """Query times step leaves fp16's range; the masses do not."""
    case = make_paged_case([32], dtype=dtype)
    case.q *= 100
    case.k_pool *= 5000
    thumbnails = summarise(case, 2)
    out = estimate(case, thumbnails, 2, impl, scale=1e-6)
    case.scale = 1e-6
    expected = brute_force(case, thumbnails, 2)
    torch.testing.assert_close(out, expected, **tolerance(dtype, 1e-1))


def test_refuses_codes_of_other_bits():
    with pytest.raises(ValueError, match=r"codes has shape .*; needed: \[2, 1, 16, 24\]"):
        block_mass_thumbnail(
            torch.zeros(1, 2, 64),
            torch.zeros(32, 1, 64),
            torch.zeros(2, 1, 16, 16, dtype=torch.uint8),
            torch.zeros(2, 1, 2, 64, dtype=torch.bfloat16),
            torch.zeros(1, 2, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            bits=3,
            scale=1.0,
            page_size=16,
            block_size=8,
            min_context=0,
            out=torch.zeros(1, 1, 2, 8),
        )
