import pytest
import torch
from factories import DTYPES, poisoned
from oracles import code_at, dequantised
from sparse_kernels import thumbnail, unpack_codes

IMPLS = ["torch", "triton"]
BITS = [2, 3, 4]
SHAPES = [(16, 64), (32, 96), (64, 128), (128, 256)]
"""(page_size, head_dim)"""


def make_keys(page_size: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages of one kind of key each, `[8 * page_size, 2, head_dim]`; the finest and coarsest magnitudes that the dtype
    allows."""
    rng = torch.Generator().manual_seed(page_size + head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    noise = normal(8, page_size, 2, head_dim)
    wide = dtype != torch.float16
    keys = noise.clone()
    keys[1] = 300 * normal(2, head_dim).sign() + 3 * noise[1]
    keys[2] = normal(2, head_dim) * 7  # constant channels
    keys[3] *= 1e30 if wide else 1e4
    keys[4] *= 1e-30 if wide else 1e-6
    keys[5] = 0
    keys[6] *= 10 ** (2 * normal(2, head_dim)).clamp(-3, 3)
    keys[7] = -keys[7].abs() - 1
    return keys.to(dtype).view(8 * page_size, 2, head_dim)


def make_thumbnails(
    keys: torch.Tensor, pages: torch.Tensor, bits: int, page_size: int, impl: str, symmetric: bool = False
):
    count = keys.shape[0] // page_size
    codes = poisoned(count, 2, page_size, keys.shape[2] * bits // 8, dtype=torch.uint8)
    low_step = poisoned(count, 2, 2, keys.shape[2], dtype=torch.bfloat16)
    outputs = {"codes": codes, "low_step": low_step}
    thumbnail(keys, pages, bits=bits, page_size=page_size, **outputs, symmetric=symmetric, impl=impl)
    return codes, low_step


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("bits", "page_size", "head_dim"), [(bits, *shape) for bits, shape in zip([2, 3, 4, 2], SHAPES, strict=True)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
def test_bounds_and_round_trip(impl, bits, page_size, head_dim, dtype, symmetric, device):
    keys = make_keys(page_size, head_dim, dtype).to(device)
    codes, low_step = make_thumbnails(keys, torch.arange(8, device=device), bits, page_size, impl, symmetric)
    paged = keys.float().view(8, page_size, 2, head_dim).transpose(1, 2)
    levels = 2**bits - 1
    low, step = low_step.float().unsqueeze(3).unbind(2)
    assert (step >= 0).all()
    assert (low <= paged).all()
    assert (paged <= low + levels * step).all()
    # Rounding outwards costs at most a bfloat16 unit on either side.
    minimum, maximum = paged.amin(2, keepdim=True), paged.amax(2, keepdim=True)
    if symmetric:
        maximum = torch.maximum(maximum, -minimum)
        minimum = -maximum
    assert (low >= minimum - minimum.abs() * 2**-7).all()
    assert (step <= (maximum - low) / levels * (1 + 2**-6)).all()
    error = (dequantised(codes, low_step, bits, head_dim) - paged.double()).abs()
    assert (error <= step.double() / 2 + 1e-6 * (maximum.abs() + minimum.abs()).double()).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("page_size", "head_dim"), SHAPES[:3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
def test_kernel_equals_reference_bit_for_bit(bits, page_size, head_dim, dtype, symmetric, device):
    keys = make_keys(page_size, head_dim, dtype).to(device)
    pages = torch.tensor([6, -1, 1, 3, 2, 5, -1], dtype=torch.int32, device=device)
    codes, low_step = make_thumbnails(keys, pages, bits, page_size, "triton", symmetric)
    expected_codes, expected_low_step = make_thumbnails(keys, pages, bits, page_size, "torch", symmetric)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(low_step.view(torch.int16), expected_low_step.view(torch.int16))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits", BITS)
def test_other_pages_stay_untouched(impl, bits, device):
    keys = make_keys(16, 64, torch.float32).to(device)
    codes, low_step = make_thumbnails(keys, torch.tensor([5, -1], device=device), bits, 16, impl)
    others = [0, 1, 2, 3, 4, 6, 7]
    assert low_step[others].isnan().all()
    assert (codes[others] == 0xA5).all()
    assert (codes[5] == 0).all()
    assert (low_step[5] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bounds_hold_where_the_range_rounds_to_whole_steps(impl, bits, dtype, device):
    """The range is a hair above `n * 32`, but its fp32 difference and quotient are exact: a step of 32 falls short."""
    levels = 2**bits - 1
    keys = torch.full((16, 2, 64), -32.0 * levels, dtype=dtype, device=device)
    keys[3] = 1e-6
    _, low_step = make_thumbnails(keys, torch.zeros(1, dtype=torch.int32, device=device), bits, 16, impl)
    low, step = low_step[0].float().unbind(1)
    assert (low == -32.0 * levels).all()
    assert (step == 32.25).all()
    assert (low + levels * step >= keys[3].float()).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_representable_constant_channels_have_step_zero(impl, device):
    keys = torch.full((16, 2, 64), -3.5, device=device)
    codes, low_step = make_thumbnails(keys, torch.zeros(1, dtype=torch.int32, device=device), 2, 16, impl)
    assert (low_step[0, :, 0] == -3.5).all()
    assert (low_step[0, :, 1] == 0).all()
    assert (codes == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_symmetric_codes_of_two_bits_have_ffds_levels(impl, device):
    keys = torch.zeros(16, 2, 64, device=device)
    keys[:6] = torch.tensor([-3.0, -1.2, -0.2, 0.1, 1.1, 2.6], device=device)[:, None, None]
    codes, low_step = make_thumbnails(keys, torch.zeros(1, dtype=torch.int64, device=device), 2, 16, impl, True)
    # s = 3 / 1.5 = 2: levels -3, -1, 1 and 3.
    levels = dequantised(codes, low_step, 2, 64)[0, :, :6]
    assert (levels == torch.tensor([-3.0, -1, -1, 1, 1, 3], device=device)[:, None]).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", [64, 96])
def test_unpack_codes(bits, head_dim):
    codes = torch.randint(256, (3, 5, head_dim * bits // 8), dtype=torch.uint8)
    unpacked = unpack_codes(codes, bits, head_dim)
    for channel in range(head_dim):
        assert torch.equal(unpacked[..., channel].int(), code_at(codes, bits, head_dim, channel))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits is 5; allowed: 2, 3, 4"),
        ({"codes": torch.zeros(2, 1, 16, 32, dtype=torch.uint8)}, "codes has shape"),
        ({"low_step": torch.zeros(2, 1, 2, 64)}, "low_step has dtype torch.float32"),
    ],
)
def test_refuses(change, message):
    arguments = {
        "bits": 2,
        "page_size": 16,
        "codes": torch.zeros(2, 1, 16, 16, dtype=torch.uint8),
        "low_step": torch.zeros(2, 1, 2, 64, dtype=torch.bfloat16),
    }
    with pytest.raises(ValueError, match=message):
        thumbnail(torch.zeros(32, 1, 64), torch.zeros(1, dtype=torch.int32), **(arguments | change))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits", BITS)
def test_thumbnails_of_other_pages_than_the_pools(impl, bits, device):
    keys = make_keys(16, 64, torch.float32).to(device)
    codes, low_step = make_thumbnails(keys, torch.arange(8, device=device), bits, 16, impl)
    moved = poisoned(40, 2, 16, 64 * bits // 8, dtype=torch.uint8), poisoned(40, 2, 2, 64, dtype=torch.bfloat16)
    pages = torch.tensor([6, -1, 1], device=device)
    targets = torch.tensor([39, 2**30, 20], dtype=torch.int32, device=device)
    sizes = {"bits": bits, "page_size": 16, "impl": impl}
    thumbnail(keys, pages, codes=moved[0], low_step=moved[1], targets=targets, **sizes)
    for got, want in zip(moved, (codes, low_step), strict=True):
        assert torch.equal(got[[39, 20]], want[[6, 1]])
        rest = [p for p in range(40) if p not in (39, 20)]
        assert (got[rest] == poisoned(1, dtype=got.dtype)).all() or got[rest].isnan().all()
    with pytest.raises(ValueError, match=r"targets has shape \[1\]; needed: \[3\]"):
        thumbnail(keys, pages, codes=moved[0], low_step=moved[1], targets=targets[:1], **sizes)
