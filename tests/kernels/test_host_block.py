"""Float8 blocks of a host pool: what is kept of keys and values."""

import pytest
import torch
from factories import mixed_blocks
from sparse_kernels import pack_blocks, unpack_blocks


@pytest.mark.parametrize(("block", "dim"), [(8, 64), (16, 96), (16, 128), (64, 256)])
def test_a_value_is_within_a_sixteenth_and_the_largest_is_used(block, dim):
    """Or within 2**-18 of the token's largest, where that is more."""
    made = mixed_blocks(9, block, dim)
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
