"""One launch for thumbnails and means writes what the two operations write, and nothing else."""

import pytest
import torch
from factories import DTYPES, poisoned
from sparse_kernels import block_statistics, page_summary, thumbnail

SHAPES = [(4, 16, 64, 16), (3, 32, 96, 16), (4, 64, 128, 64), (2, 64, 64, 32), (3, 128, 256, 64)]
"""(bits, page_size, head_dim, cell)"""

HEADS = 3


def make_case(page_size: int, head_dim: int, cell: int, bits: int, dtype: torch.dtype, count: int):
    rng = torch.Generator().manual_seed(page_size + head_dim + bits)
    # Keys and values of a wider tensor, so that their strides differ from their shapes.
    both = torch.randn(8 * page_size, 2, HEADS, head_dim, generator=rng).to(dtype)
    outputs = {
        "codes": poisoned(count, HEADS, page_size, head_dim * bits // 8, dtype=torch.uint8),
        "low_step": poisoned(count, HEADS, 2, head_dim, dtype=torch.bfloat16),
        "means": poisoned(count, HEADS, page_size // cell, head_dim, dtype=dtype),
    }
    return both[:, 0], both[:, 1], outputs


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("bits", "page_size", "head_dim", "cell"), SHAPES)
@pytest.mark.parametrize("moved", [False, True], ids=["own pages", "other pages"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_it_writes_what_the_two_operations_write(impl, bits, page_size, head_dim, cell, moved, symmetric, device):
    dtype = DTYPES[(page_size + bits) % len(DTYPES)]
    k, v, outputs = make_case(page_size, head_dim, cell, bits, dtype, 12 if moved else 8)
    k, v = k.to(device), v.to(device)
    pages = torch.tensor([6, -1, 1, 3, -1], dtype=torch.int32, device=device)
    targets = torch.tensor([11, 99, 0, 8, 99], dtype=torch.int32, device=device) if moved else None
    written = {name: tensor.to(device) for name, tensor in outputs.items()}
    expected = {name: tensor.clone() for name, tensor in written.items()}
    codes = {"bits": bits, "symmetric": symmetric}
    sizes = {"page_size": page_size, "targets": targets, "impl": impl}
    page_summary(k, v, pages, cell=cell, **codes, **sizes, **written)
    thumbnail(k, pages, **codes, codes=expected["codes"], low_step=expected["low_step"], **sizes)
    block_statistics(v, pages, kind="mean", block_size=cell, out=expected["means"].unsqueeze(3), **sizes)
    for name, tensor in written.items():
        # Poison is NaN in part: compared as bits.
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_no_page_at_all(impl, device):
    k, v, outputs = make_case(16, 64, 16, 4, torch.float32, 8)
    before = {name: tensor.clone() for name, tensor in outputs.items()}
    for pages in (torch.full((3,), -1, dtype=torch.int32), torch.empty(0, dtype=torch.int64)):
        page_summary(
            k.to(device), v.to(device), pages.to(device), bits=4, page_size=16, cell=16, impl=impl,
            **{name: tensor.to(device) for name, tensor in outputs.items()},
        )  # fmt: skip
    assert all(torch.equal(outputs[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)


def test_what_does_not_fit_is_refused(device):
    k, v, outputs = make_case(16, 64, 16, 4, torch.float32, 8)
    pages = torch.tensor([1])
    sizes = {"bits": 4, "page_size": 16, "cell": 16}
    for wrong, message in (
        ({"v_pool": v[:, :2]}, "v_pool"),
        ({"v_pool": v.half()}, "v_pool"),
        ({"means": outputs["means"][:, :, :, :32]}, "means"),
        ({"cell": 32}, "block_size is 32"),
        ({"bits": 5}, "bits"),
        ({"codes": outputs["codes"][:4]}, "codes"),
        ({"targets": torch.tensor([1, 2])}, "targets"),
    ):
        arguments = {"k_pool": k, "v_pool": v, "pages": pages, **sizes, **outputs, **wrong}
        with pytest.raises(ValueError, match=message):
            page_summary(**arguments)
