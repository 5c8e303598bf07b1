import pytest
import torch
from factories import HUGE_PAGE, poisoned
from sparse_kernels import snapshot_page_table

IMPLS = ["torch", "triton"]


def brute_force(req_to_token, rows, lengths, page_size, page_table, seq_lens_out, closing_pages):
    for b, length in enumerate(lengths):
        seq_lens_out[b] = length
        closing_pages[b] = -1
        for t in range(length):
            page_table[b, t // page_size] = req_to_token[rows[b], t] // page_size
        if length and length % page_size == 0:
            closing_pages[b] = req_to_token[rows[b], length - 1] // page_size


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("int_dtype", [torch.int32, torch.int64])
def test_snapshot(impl, page_size, int_dtype, device):
    lengths = [1, page_size - 1, 0, page_size, page_size + 1, 3 * page_size, 5 * page_size - 2]
    generator = torch.Generator().manual_seed(page_size)
    ctx = 5 * page_size + 3
    pages = torch.randperm(60, generator=generator).int()[: 10 * 6].view(10, 6)
    slots = pages.repeat_interleave(page_size, 1) * page_size + torch.arange(6 * page_size) % page_size
    req_to_token = slots[:, :ctx].int().contiguous()
    # A padded row's index must not be followed.
    rows = [7, 0, HUGE_PAGE, 3, 9, 1, 5]
    outputs = [poisoned(9, 8, dtype=torch.int32), poisoned(8, dtype=torch.int32), poisoned(7, dtype=torch.int32)]
    expected = [tensor.clone().cpu() for tensor in outputs]
    brute_force(req_to_token, rows, lengths, page_size, *expected)
    snapshot_page_table(
        req_to_token.to(device),
        torch.tensor(rows, dtype=int_dtype, device=device),
        torch.tensor([*lengths, 99], dtype=int_dtype, device=device),
        page_size=page_size,
        page_table=outputs[0],
        seq_lens_out=outputs[1],
        closing_pages=outputs[2],
        impl=impl,
    )
    for got, want in zip(outputs, expected, strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_more_pages_than_one_program_copies(impl, device):
    page_size, pages = 16, 600
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()
    req_to_token = (order * page_size)[:, None] + torch.arange(page_size, dtype=torch.int32)
    page_table = poisoned(1, 700, dtype=torch.int32)
    closing = poisoned(1, dtype=torch.int32)
    snapshot_page_table(
        req_to_token.view(1, -1).to(device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.full((1,), pages * page_size, dtype=torch.int64, device=device),
        page_size=page_size,
        page_table=page_table,
        seq_lens_out=poisoned(1, dtype=torch.int32),
        closing_pages=closing,
        impl=impl,
    )
    assert torch.equal(page_table[0, :pages].cpu(), order)
    assert (page_table[0, pages:] == poisoned(1, dtype=torch.int32)).all()
    assert closing.item() == order[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 48}, "page_size is 48; allowed: 16, 32, 64, 128"),
        ({"page_table": torch.zeros(1, 4, dtype=torch.int32)}, "page_table has shape"),
        ({"closing_pages": torch.zeros(2, dtype=torch.int64)}, "closing_pages has dtype torch.int64"),
        ({"impl": "cuda"}, "impl is 'cuda'"),
    ],
)
def test_refuses(change, message):
    arguments = {
        "page_size": 16,
        "page_table": torch.zeros(2, 4, dtype=torch.int32),
        "seq_lens_out": torch.zeros(2, dtype=torch.int32),
        "closing_pages": torch.zeros(2, dtype=torch.int32),
    }
    lengths = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        snapshot_page_table(torch.zeros(3, 64, dtype=torch.int32), lengths, lengths, **(arguments | change))
