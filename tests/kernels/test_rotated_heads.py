import math

import pytest
import torch
from factories import DEVICE, DTYPES, poisoned
from mass_cases import over_impls
from sparse_kernels import rotated_heads

PLACES = 40
POSITIONS = [0, 7, PLACES - 1, PLACES + 5, -1]
"""The last two are outside the table: of a request beyond it, and of a padded row."""


def table(angles: int) -> torch.Tensor:
    turns = torch.arange(PLACES)[:, None] * 10000.0 ** (-torch.arange(angles) / angles)
    return torch.stack((turns.cos(), turns.sin()), 1).float()


def rotated(y, head_norm, eps, angles, interleaved):
    """By complex numbers, in float64: `[T, H, D]`."""
    heads = y.double()
    if head_norm is not None:
        heads = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * head_norm.double()
    out = heads.clone()
    for t, position in enumerate(POSITIONS):
        place = min(max(position, 0), PLACES - 1)
        for i in range(angles):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + angles)
            turn = place * 10000.0 ** (-i / angles)
            out[t, :, a] = heads[t, :, a] * math.cos(turn) - heads[t, :, b] * math.sin(turn)
            out[t, :, b] = heads[t, :, a] * math.sin(turn) + heads[t, :, b] * math.cos(turn)
    return out


@over_impls
@pytest.mark.parametrize(
    ("head_dim", "angles", "interleaved", "normed", "dtype"),
    [
        *((64, 32, False, False, DTYPES[0]), (96, 48, False, True, DTYPES[1])),
        *((128, 32, False, True, DTYPES[0]), (64, 16, True, True, DTYPES[1])),
    ],
)
def test_norms_and_rotates(impl, head_dim, angles, interleaved, normed, dtype):
    rng = torch.Generator().manual_seed(2)
    # A token's heads are part of a wider projection.
    wide = torch.randn(len(POSITIONS), 5, head_dim, generator=rng).to(dtype)
    norm = torch.rand(head_dim, generator=rng) + 0.5 if normed else None
    out = poisoned(len(POSITIONS), 5, head_dim)
    rotated_heads(
        wide.to(DEVICE)[:, :3],
        table(angles).to(DEVICE),
        torch.tensor(POSITIONS, device=DEVICE),
        interleaved=interleaved,
        head_norm=None if norm is None else norm.to(DEVICE),
        eps=1e-3,
        out=out[:, :3],
        impl=impl,
    )
    expected = rotated(wide[:, :3], norm, 1e-3, angles, interleaved)
    torch.testing.assert_close(out[:, :3].cpu().double(), expected, atol=1e-4, rtol=1e-4)
    assert out[:, 3:].isnan().all()


@over_impls
def test_rounds_to_the_type_of_out(impl):
    y = torch.randn(2, 2, 64, device=DEVICE)
    outs = [torch.empty(2, 2, 64, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.float16)]
    for out in outs:
        places = torch.tensor([3, 4], device=DEVICE)
        rotated_heads(y, table(32).to(DEVICE), places, interleaved=False, out=out, impl=impl)
    assert torch.equal(outs[0].half(), outs[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(2, 3, 128)[..., :64]}, "y has stride 128 between heads; needed: 64"),
        ({"cos_sin": torch.zeros(4, 2, 33)}, "cos_sin has 33 angles; needed: 1 to 32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions has shape \[3\]; needed: \[2\]"),
    ],
)
def test_refuses(change, message):
    arguments = {
        "y": torch.zeros(2, 3, 64),
        "cos_sin": torch.zeros(4, 2, 32),
        "positions": torch.zeros(2, dtype=torch.int64),
        "interleaved": False,
        "out": torch.zeros(2, 3, 64),
    }
    with pytest.raises(ValueError, match=message):
        rotated_heads(**(arguments | change))
