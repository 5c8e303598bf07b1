import pytest
import torch
from factories import DTYPES, make_paged_case, poisoned
from sparse_kernels import split_dequantise, split_dequantise_reference
from split_cases import split_keys


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (32, 96), (64, 128), (128, 64), (16, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_equals_reference_in_a_strided_output(page_size, head_dim, dtype):
    """A request's pages, in its order, at the head of a longer buffer of each KV head."""
    case = make_paged_case([4 * page_size + 3], page_size=page_size, head_dim=head_dim, dtype=dtype, seed=head_dim)
    keys = split_keys(case)
    pages = case.page_table[0, :4]
    outs = [poisoned(case.num_kv_heads, 5 * page_size, head_dim).to(dtype) for _ in range(2)]
    sources = keys.codes, keys.low_step, keys.residual
    split_dequantise_reference(*sources, pages, page_size=page_size, out=outs[0][:, : 4 * page_size])
    split_dequantise(*sources, pages, page_size=page_size, out=outs[1][:, : 4 * page_size], impl="triton")
    expected, made = (out[:, : 4 * page_size].float() for out in outs)
    # A fused multiply and add rounds once less: one unit in the last place.
    torch.testing.assert_close(made, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert outs[1][:, 4 * page_size :].isnan().all()


def test_nothing_and_refusals():
    case = make_paged_case([40], page_size=16, device="cpu")
    sources = [torch.zeros(4, 2, 16, 16, dtype=torch.uint8), torch.zeros(4, 2, 2, 64, dtype=torch.bfloat16)]
    sources.append(torch.zeros(4, 2, 16, 64, dtype=torch.uint8))
    none = torch.zeros(0, dtype=torch.int32)
    split_dequantise(*sources, none, page_size=16, out=torch.zeros(2, 0, 64))
    with pytest.raises(ValueError, match=r"out has shape \[2, 15, 64\]; needed: \[2, 16, 64\]"):
        split_dequantise(*sources, case.page_table[0, :1], page_size=16, out=torch.zeros(2, 15, 64))
