"""Shapes and helpers that the block-mass tests share."""

import pytest
import torch
from factories import DEVICE, DTYPES, PagedCase, make_paged_case, poisoned

IMPLS = ["torch", "triton"]

SHAPES = [
    # page_size, block_size, head_dim, group_size
    (16, 8, 64, 1),
    (16, 16, 96, 3),
    (32, 8, 128, 4),
    (32, 32, 64, 16),
    (64, 16, 96, 7),
    (64, 64, 128, 9),
    (128, 32, 256, 4),
]

over_shapes = pytest.mark.parametrize(("page_size", "block_size", "head_dim", "group_size"), SHAPES)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
over_impls = pytest.mark.parametrize("impl", IMPLS)


def ragged_case(
    page_size: int, block_size: int, head_dim: int, group_size: int, dtype: torch.dtype, **kwargs
) -> PagedCase:
    """Every interesting length, a padded row, and a prefix shared between requests; on a GPU some long rows as well."""
    lengths = [1, page_size - 1, page_size, 0, page_size + 1, 2 * page_size + block_size // 2]
    if DEVICE == "cuda":
        lengths += [37 * page_size + 3, 0, 0, 19 * page_size]
    return make_paged_case(
        lengths,
        group_size=group_size,
        head_dim=head_dim,
        page_size=page_size,
        block_size=block_size,
        dtype=dtype,
        shared_pages=1,
        **kwargs,
    )


def mass_output(case: PagedCase) -> torch.Tensor:
    """A poisoned `log_mass`, as a strided view of a larger buffer."""
    buffer = poisoned(case.batch + 1, case.num_kv_heads, case.group_size, case.capacity + 5)
    return buffer[: case.batch, :, :, : case.capacity]


def common_arguments(case: PagedCase, **changes) -> dict:
    """Keyword arguments of every block-mass operation."""
    return {
        "scale": case.scale,
        "page_size": case.page_size,
        "block_size": case.block_size,
        "min_context": 0,
    } | changes


def tolerance(dtype: torch.dtype, native: float) -> dict:
    """`native` where half-precision products are rounded on the way, in nats; else fp32's."""
    atol = native if DEVICE == "cuda" and dtype != torch.float32 else 5e-5
    return {"atol": atol, "rtol": 1e-5, "equal_nan": True}
