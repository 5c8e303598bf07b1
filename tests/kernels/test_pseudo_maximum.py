import pytest
import torch
from factories import DEVICE, make_paged_case, poisoned
from mass_cases import common_arguments, over_dtypes, over_impls, over_shapes, ragged_case
from sparse_kernels import pseudo_maximum


def forced_tokens(case, b, sink_tokens, window_tokens):
    """Tokens of the forced blocks, by their definition: a loop over tokens."""
    length, size = case.lengths[b], case.block_size
    asked = [
        t
        for t in range(length)
        if t < sink_tokens or t >= length - window_tokens or t >= length // case.page_size * case.page_size
    ]
    blocks = {t // size for t in asked}
    # A sink of more tokens than there are forces blocks that do not exist; a partial sink block counts as a whole.
    blocks |= set(range(-(-min(sink_tokens, length) // size)))
    return [t for t in range(length) if t // size in blocks]


def expected_maximum(case, sink_tokens, window_tokens, min_context=0):
    out = poisoned(case.batch, case.num_kv_heads, case.group_size)
    for b, length in enumerate(case.lengths):
        if length == 0 or length < min_context:
            continue
        keys = case.keys(b)[forced_tokens(case, b, sink_tokens, window_tokens)].double()
        q = case.q[b].double().view(case.num_kv_heads, case.group_size, -1)
        scores = torch.einsum("hgd,thd->hgt", q, keys) * case.scale
        out[b] = scores.amax(-1) if len(keys) else float("-inf")
    return out


def maximum(case, impl, sink_tokens, window_tokens, **changes):
    out = poisoned(case.batch, case.num_kv_heads, case.group_size)
    forcing = {"sink_tokens": sink_tokens, "window_tokens": window_tokens}
    arguments = common_arguments(case, **changes)
    pseudo_maximum(case.q, case.k_pool, case.page_table, case.seq_lens, **arguments, **forcing, out=out, impl=impl)
    return out


@over_impls
@over_shapes
@over_dtypes
@pytest.mark.parametrize(("sink_tokens", "window_tokens"), [(1, 1), (20, 40), (0, 0)])
def test_maxima(impl, page_size, block_size, head_dim, group_size, dtype, sink_tokens, window_tokens):
    case = ragged_case(page_size, block_size, head_dim, group_size, dtype)
    out = maximum(case, impl, sink_tokens, window_tokens)
    atol = 5e-3 if DEVICE == "cuda" else 1e-4
    expected = expected_maximum(case, sink_tokens, window_tokens)
    torch.testing.assert_close(out, expected, atol=atol, rtol=1e-4, equal_nan=True)


@over_impls
def test_rows_below_min_context_stay_untouched(impl):
    case = ragged_case(16, 8, 64, 2, torch.float16)
    out = maximum(case, impl, 4, 16, min_context=17)
    torch.testing.assert_close(out, expected_maximum(case, 4, 16, 17), atol=5e-3, rtol=1e-4, equal_nan=True)


@over_impls
def test_a_score_that_is_no_number_is_infinite(impl):
    case = make_paged_case([40], dtype=torch.float16)
    case.k_pool[case.slots(0)[39], 1] = float("nan")
    out = maximum(case, impl, 4, 4)
    assert out[0, 0].isfinite().all()
    assert (out[0, 1] == float("inf")).all()
