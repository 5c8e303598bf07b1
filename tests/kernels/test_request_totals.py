"""Blocks read by each request: kernel = reference = brute force; padded rows are zeros and nothing else is written."""

import pytest
import torch
from factories import DEVICE
from sparse_kernels.request_totals import request_totals

IMPLS = ["torch", "triton"]
UNTOUCHED = -7


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("layers", "dense", "kv_heads"), [(2, 0, 2), (1, 3, 1), (32, 2, 8), (0, 4, 3), (80, 0, 16)])
@pytest.mark.parametrize("lengths", [[1], [0, 0], [63, 0, 64, 65, 130_000, 8]])
def test_totals_are_those_of_each_request(
    impl: str, layers: int, dense: int, kv_heads: int, lengths: list[int]
) -> None:
    block_size = 16
    generator = torch.Generator().manual_seed(layers * 100 + len(lengths))
    # The buffer has more rows than the batch, as that of a server has; counts of padded rows are leftovers.
    counts = torch.randint(0, 9000, (layers, len(lengths) + 3, kv_heads), generator=generator, dtype=torch.int32)
    expected = []
    for b, length in enumerate(lengths):
        blocks = -(-length // block_size)
        listed = int(counts[:, b].sum()) if length else 0
        expected.append([listed + dense * kv_heads * blocks, (layers + dense) * kv_heads * blocks])
    out = torch.full((len(lengths) + 2, 2), UNTOUCHED, dtype=torch.int64, device=DEVICE)
    request_totals(
        counts.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        layers=layers + dense,
        dense_layers=dense,
        block_size=block_size,
        out=out,
        impl=impl,
    )
    assert out.tolist() == [*expected, [UNTOUCHED] * 2, [UNTOUCHED] * 2]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_batch_without_requests_writes_nothing(impl: str) -> None:
    out = torch.full((1, 2), UNTOUCHED, dtype=torch.int64, device=DEVICE)
    counts = torch.ones((1, 1, 1), dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    request_totals(counts, lengths, layers=2, dense_layers=0, block_size=8, out=out, impl=impl)
    assert out.tolist() == [[UNTOUCHED] * 2]


@pytest.mark.parametrize("impl", IMPLS)
def test_counts_of_a_view_are_found_by_its_strides(impl: str) -> None:
    every = torch.arange(2 * 5 * 6, dtype=torch.int32, device=DEVICE).view(2, 5, 6)
    counts = every[:, 1:4, :2]
    out = torch.zeros((3, 2), dtype=torch.int64, device=DEVICE)
    lengths = torch.tensor([8, 9, 17], dtype=torch.int32, device=DEVICE)
    request_totals(counts, lengths, layers=2, dense_layers=0, block_size=8, out=out, impl=impl)
    assert out[:, 0].tolist() == counts.sum((0, 2)).tolist()
    assert out[:, 1].tolist() == [4, 8, 12]


def refusals() -> list[tuple[dict, str]]:
    return [
        ({"block_counts": torch.zeros((1, 1, 2), dtype=torch.int32)}, "block_counts has 1 rows a layer"),
        ({"block_counts": torch.zeros((1, 2, 2))}, "block_counts has dtype"),
        ({"seq_lens": torch.ones(2)}, "seq_lens has dtype"),
        ({"out": torch.zeros((2, 3), dtype=torch.int64)}, "out has shape"),
        ({"out": torch.zeros((1, 2), dtype=torch.int64)}, "out has shape"),
        ({"out": torch.zeros((2, 2))}, "out has dtype"),
        ({"dense_layers": -1}, "dense_layers is -1"),
        ({"dense_layers": 3}, "dense_layers is 3"),
        ({"block_size": 7}, "block_size is 7"),
    ]


@pytest.mark.parametrize(("changes", "message"), refusals(), ids=[message for _, message in refusals()])
def test_refuses_other_arguments(changes: dict, message: str) -> None:
    arguments = {
        "block_counts": torch.zeros((1, 2, 2), dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "layers": 2,
        "dense_layers": 0,
        "block_size": 8,
        "out": torch.zeros((2, 2), dtype=torch.int64),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        request_totals(arguments.pop("block_counts"), arguments.pop("seq_lens"), **arguments)
