"""Float8 blocks: what is kept of keys and values, and the kernel that gives them back."""

import pytest
import torch
import triton
import triton.language as tl
from factories import DEVICE, poisoned
from sparse_kernels import _float8_bits as float8
from sparse_kernels import block_unpack, pack_blocks, unpack_blocks

IMPLS = ["torch", "triton"]


def blocks(number, block, dim, seed=0):
    """Of magnitudes from 2**-20 to 2**20 by token, and of 2**-12 to 1 of that by channel."""
    rng = torch.Generator().manual_seed(seed)
    made = torch.randn(number, 2, block, dim, generator=rng)
    made *= torch.randint(-20, 21, (number, 2, block, 1), generator=rng).exp2()
    made *= torch.randint(-12, 1, made.shape, generator=rng).exp2()
    made[0, 0, 0] = 0
    made[0, 0, 1, :3] = torch.tensor([448.0, -448.0, 449.0])
    made[0, 0, 2] = 448
    made[0, 1, 0] = 1e-40
    made[0, 1, 1] = 3e38
    return made


@pytest.mark.parametrize(("block", "dim"), [(8, 64), (16, 96), (16, 128), (64, 256)])
def test_a_value_is_within_a_sixteenth_and_the_largest_is_used(block, dim):
    """Or within 2**-18 of the token's largest, where that is more."""
    made = blocks(9, block, dim)
    packed = pack_blocks(made)
    assert packed.shape == (9, 2 * block * (dim + 1))
    assert packed.shape[1] % 16 == 0
    back = unpack_blocks(packed, block, torch.float32)
    largest = made.abs().amax(-1, keepdim=True)
    fits = largest > 2.0**-100
    assert ((back - made).abs() <= torch.maximum(made.abs() / 16, largest * 2.0**-17))[fits.expand_as(made)].all()
    assert (back[0, 0, 0] == 0).all()
    # Every number has four significant bits: bfloat16 holds it as it is.
    usual = (largest > 2.0**-60) & (largest < 2.0**60)
    exact = unpack_blocks(packed, block, torch.bfloat16).float()
    assert torch.equal(exact[usual.expand_as(exact)], back[usual.expand_as(back)])
    assert torch.equal(unpack_blocks(pack_blocks(back), block, torch.float32), back), "what was rounded stays as it is"


def test_what_is_not_finite_is_no_number_again():
    made = torch.zeros(1, 2, 8, 64)
    made[0, 0, 1, 5], made[0, 1, 2, 0], made[0, 1, 3, 0] = float("nan"), float("inf"), -float("inf")
    back = unpack_blocks(pack_blocks(made), 8, torch.float32)
    assert back.isnan().nonzero().tolist() == [[0, 0, 1, 5], [0, 1, 2, 0], [0, 1, 3, 0]]


@triton.jit
def _round_trip(values, codes, exponents, back, ROWS: tl.constexpr, D: tl.constexpr):
    row = tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    value = tl.load(values + at)
    exponent = float8.scale_bits(tl.max(tl.abs(value), 1))
    code = float8.encode(value, exponent[:, None])
    tl.store(codes + at, code)
    tl.store(exponents + row, exponent.to(tl.uint8))
    tl.store(back + at, float8.decode(code, exponent[:, None]))


def test_kernels_round_as_torch_does():
    made = blocks(8, 16, 64, seed=3).to(DEVICE)
    packed = pack_blocks(made).cpu()
    codes = torch.zeros(made.shape, dtype=torch.uint8, device=DEVICE)
    exponents = torch.zeros(made.shape[:3], dtype=torch.uint8, device=DEVICE)
    back = poisoned(*made.shape)
    _round_trip[(1,)](made, codes, exponents, back, ROWS=256, D=64)
    assert torch.equal(torch.cat((codes.cpu().flatten(1), exponents.cpu().flatten(1)), 1), packed)
    assert torch.equal(back.cpu(), unpack_blocks(packed, 16, torch.float32))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("block", "dim", "count", "programs"),
    [(16, 64, 11, 4), (8, 96, 25, 1), (16, 128, 1, 2), (64, 256, 3, 2), (8, 64, 0, 3)],
)
def test_listed_blocks_are_decoded_and_no_others(impl, dtype, block, dim, count, programs):
    rng = torch.Generator().manual_seed(count)
    source = pack_blocks(torch.randn(40, 2, block, dim, generator=rng))
    source = source.pin_memory() if DEVICE == "cuda" else source
    target = poisoned(35, 2, block, dim, dtype=dtype)
    come_from = torch.randint(0, 40, (33,), generator=rng).int()
    go_to = torch.randperm(35, generator=rng)[:33].int()
    expected = target.clone().cpu()
    expected[go_to[:count].long()] = unpack_blocks(source[come_from[:count].long()], block, dtype)
    # What lies beyond the count must not be followed.
    come_from[count:], go_to[count:] = 2**30, 2**30
    n = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    block_unpack(source, target, come_from.to(DEVICE), go_to.to(DEVICE), n, programs=programs, impl=impl)
    torch.testing.assert_close(target.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_refuses():
    n = torch.zeros(1, dtype=torch.int32)
    target = torch.zeros(3, 2, 8, 64)
    with pytest.raises(ValueError, match=r"source has shape \[3, 1024\]; needed: \[\*, 1040\]"):
        block_unpack(torch.zeros(3, 1024, dtype=torch.uint8), target, n, n, n)
    with pytest.raises(ValueError, match=r"source has dtype torch.int8"):
        block_unpack(torch.zeros(3, 1040, dtype=torch.int8), target, n, n, n)
