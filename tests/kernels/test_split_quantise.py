import numpy as np
import pytest
import torch
from factories import DEVICE, DTYPES, make_paged_case, poisoned
from sparse_kernels import split_dequantise, split_quantise, thumbnail, unpack_codes
from split_cases import empty_pages

SHAPES = [(16, 64), (32, 96), (64, 128), (128, 64), (16, 256)]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("page_size", "head_dim"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_bias", [0.0, 40.0])
def test_round_trip_against_float64(impl, page_size, head_dim, dtype, key_bias):
    case = make_paged_case(
        [3 * page_size + 5, page_size, 0],
        page_size=page_size,
        head_dim=head_dim,
        dtype=dtype,
        seed=page_size,
        key_bias=key_bias,
    )
    # A channel that is constant in a page, and one whose range is tiny beside its value.
    case.k_pool[:, 0, 3] = 2.0
    case.k_pool[:, 1, 5] = 64.0 + case.k_pool[:, 1, 5] / 64
    closed = case.closed_pages()
    made = empty_pages(case.num_pages, case.num_kv_heads, page_size, head_dim)
    untouched = {name: tensor.clone() for name, tensor in made.items()}
    padded = torch.cat((closed, torch.full((1,), -1, dtype=torch.int32, device=DEVICE)))
    split_quantise(case.k_pool, padded, page_size=page_size, **made, impl=impl)
    out = poisoned(case.num_kv_heads, len(closed) * page_size, head_dim)
    split_dequantise(*made.values(), closed, page_size=page_size, out=out, impl=impl)

    slots = closed.long()[:, None] * page_size + torch.arange(page_size, device=closed.device)
    keys = case.k_pool[slots.flatten()].double().cpu().transpose(0, 1)
    low, step = made["low_step"][closed.long()].double().cpu().unbind(2)
    low, step = (each.transpose(0, 1).repeat_interleave(page_size, 1) for each in (low, step))
    codes = unpack_codes(made["codes"][closed.long()], 2, head_dim).double().cpu().transpose(0, 1).flatten(1, 2)
    rest = made["residual"][closed.long()].double().cpu().transpose(0, 1).flatten(1, 2)
    exact = low + step * (256 * codes + rest - 128) / 256
    np.testing.assert_allclose(out.double().cpu().numpy(), exact.numpy(), rtol=3e-7, atol=3e-7)
    error = (exact - keys).abs()
    assert (error <= step / 256 * 1.001 + keys.abs() * 1e-7).all()
    assert (error <= step / 512 * 1.001 + keys.abs() * 1e-7).double().mean() > 0.99
    assert (error.square().sum() / keys.square().sum()).sqrt() < 0.005
    assert torch.equal(exact[0, :, 3], keys[0, :, 3])
    others = torch.ones(case.num_pages, dtype=torch.bool, device=DEVICE)
    others[closed.long()] = False
    for name, tensor in made.items():
        assert torch.equal(tensor[others].view(torch.uint8), untouched[name][others].view(torch.uint8))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_codes_are_the_thumbnail(impl):
    case = make_paged_case([200, 90], page_size=32, head_dim=96, dtype=DTYPES[0], key_bias=10.0)
    closed = case.closed_pages()
    made = empty_pages(case.num_pages, case.num_kv_heads, 32, 96)
    expected = {name: tensor.clone() for name, tensor in made.items() if name != "residual"}
    split_quantise(case.k_pool, closed, page_size=32, **made, impl=impl)
    thumbnail(case.k_pool, closed, bits=2, page_size=32, **expected, impl="torch")
    for name, tensor in expected.items():
        assert torch.equal(made[name].view(torch.uint8), tensor.view(torch.uint8))


def test_kernel_equals_reference_bit_for_bit_and_takes_targets():
    case = make_paged_case([300, 64], page_size=64, head_dim=64, dtype=DTYPES[0])
    # Rows of open pages: the first pages of a pool of their own.
    pages = torch.tensor([2, -1, 0], dtype=torch.int32, device=DEVICE)
    pool = torch.randn(3 * 64, 2, 64, device=DEVICE).to(DTYPES[0])
    targets = torch.tensor([1, 2**30, 4], dtype=torch.int32, device=DEVICE)
    made = [empty_pages(case.num_pages, 2, 64, 64) for _ in range(2)]
    for impl, each in zip(("torch", "triton"), made, strict=True):
        split_quantise(pool, pages, page_size=64, **each, targets=targets, impl=impl)
    for name, tensor in made[0].items():
        assert torch.equal(tensor.view(torch.uint8), made[1][name].view(torch.uint8)), name


def test_refuses():
    pool = torch.zeros(32, 2, 64)
    pages = torch.zeros(1, dtype=torch.int32)
    made = {
        "codes": torch.zeros(4, 2, 16, 16, dtype=torch.uint8),
        "low_step": torch.zeros(4, 2, 2, 64, dtype=torch.bfloat16),
        "residual": torch.zeros(4, 2, 16, 64, dtype=torch.uint8),
    }
    split_quantise(pool, pages, page_size=16, **made)
    with pytest.raises(ValueError, match=r"codes has shape \[4, 2, 16, 32\]; needed: \[4, 2, 16, 16\]"):
        split_quantise(pool, pages, page_size=16, **made | {"codes": torch.zeros(4, 2, 16, 32, dtype=torch.uint8)})
    with pytest.raises(ValueError, match=r"residual has dtype torch.int8"):
        split_quantise(pool, pages, page_size=16, **made | {"residual": made["residual"].to(torch.int8)})
    with pytest.raises(ValueError, match="page_size is 48"):
        split_quantise(pool, pages, page_size=48, **made)
