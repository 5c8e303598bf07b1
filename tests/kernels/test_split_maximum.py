import pytest
import torch
from factories import DEVICE, poisoned
from mass_cases import common_arguments, over_dtypes, over_impls, over_shapes, ragged_case
from sparse_kernels import split_maximum
from split_cases import split_keys, without_split_keys
from test_pseudo_maximum import expected_maximum


def maximum(case, keys, impl, sink_tokens, window_tokens, **changes):
    out = poisoned(case.batch, case.num_kv_heads, case.group_size)
    forcing = {"sink_tokens": sink_tokens, "window_tokens": window_tokens}
    arguments = common_arguments(case, **changes)
    split_maximum(case.q, keys, case.page_table, case.seq_lens, **arguments, **forcing, out=out, impl=impl)
    return out


@over_impls
@over_shapes
@over_dtypes
@pytest.mark.parametrize(("sink_tokens", "window_tokens"), [(1, 1), (20, 40), (0, 0)])
def test_maxima_of_the_keys_that_split_ones_stand_for(
    impl, page_size, block_size, head_dim, group_size, dtype, sink_tokens, window_tokens
):
    """What must not be read, residuals of open pages among it, is poisoned."""
    case = ragged_case(page_size, block_size, head_dim, group_size, dtype)
    keys = split_keys(case)
    out = maximum(case, keys, impl, sink_tokens, window_tokens)
    expected = expected_maximum(without_split_keys(case, keys), sink_tokens, window_tokens)
    atol = 5e-3 if DEVICE == "cuda" else 1e-4
    torch.testing.assert_close(out, expected, atol=atol, rtol=1e-4, equal_nan=True)


@over_impls
def test_large_keys(impl):
    """As of models with a bias on their keys."""
    case = ragged_case(64, 16, 128, 4, torch.float16, key_bias=100.0)
    keys = split_keys(case)
    out = maximum(case, keys, impl, 20, 40)
    torch.testing.assert_close(
        out, expected_maximum(without_split_keys(case, keys), 20, 40), atol=2e-2, rtol=1e-4, equal_nan=True
    )


@over_impls
def test_rows_below_min_context_stay_untouched(impl):
    case = ragged_case(16, 8, 64, 2, torch.float16)
    keys = split_keys(case)
    out = maximum(case, keys, impl, 4, 16, min_context=17)
    expected = expected_maximum(without_split_keys(case, keys), 4, 16, 17)
    torch.testing.assert_close(out, expected, atol=5e-3, rtol=1e-4, equal_nan=True)


@over_impls
def test_a_score_that_is_no_number_is_infinite(impl):
    case = ragged_case(16, 8, 64, 2, torch.float16)
    keys = split_keys(case)
    # Request 1 has an open page, request 2 a closed one.
    keys.open_keys[int(keys.open_rows[1]) * 16 + 3, 1] = float("nan")
    keys.low_step[int(case.page_table[2, 0]), 0, 0, 7] = float("nan")
    out = maximum(case, keys, impl, 1, 16)
    assert out[1, 0].isfinite().all()
    assert (out[1, 1] == float("inf")).all()
    assert (out[2, 0] == float("inf")).all()
    assert out[2, 1].isfinite().all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"out": torch.empty(6, 2, 3)}, "out"),
        ({"page_size": 32}, "residual"),
        ({"seq_lens": torch.zeros(6)}, "seq_lens"),
    ],
)
def test_errors_name_the_argument(change, named):
    case = ragged_case(16, 8, 64, 2, torch.float16)
    arguments = {
        "page_table": case.page_table,
        "seq_lens": case.seq_lens,
        "out": poisoned(case.batch, case.num_kv_heads, 2),
        "sink_tokens": 1,
        "window_tokens": 1,
        **common_arguments(case),
        **change,
    }
    page_table, seq_lens = arguments.pop("page_table"), arguments.pop("seq_lens")
    with pytest.raises(ValueError, match=named):
        split_maximum(case.q, split_keys(case), page_table, seq_lens, **arguments)
