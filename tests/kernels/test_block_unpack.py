"""Float8 blocks: the kernel that copies and decodes them, and that kernels round as torch does."""

import pytest
import torch
import triton
import triton.language as tl
from factories import DEVICE, mixed_blocks, poisoned
from sparse_kernels import _float8_bits as float8
from sparse_kernels import block_unpack, pack_blocks, unpack_blocks

IMPLS = ["torch", "triton"]


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
    made = mixed_blocks(8, 16, 64, seed=3).to(DEVICE)
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
