import pytest
import torch
from factories import DEVICE, DTYPES, poisoned
from sparse_kernels import block_store, pack_blocks

IMPLS = ["torch", "triton"]


def on_host(tensor):
    return tensor.pin_memory() if DEVICE == "cuda" else tensor


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "page", "block"),
    [(5, 2, 64, 16, 8), (33, 1, 96, 32, 16), (70, 3, 128, 64, 16), (1, 2, 256, 16, 16), (0, 2, 64, 16, 16)],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("float8", [False, True])
def test_store(impl, tokens, heads, dim, page, block, dtype, float8):
    rng = torch.Generator().manual_seed(tokens)
    pages, rows, per_page = 9, 3, page // block
    # A fused projection: keys and values are views of a wider tensor.
    fused = torch.randn(tokens, 2 * heads + 1, dim, generator=rng).to(dtype).to(DEVICE)
    k, v = fused[:, :heads], fused[:, heads : 2 * heads]
    places = torch.randperm(pages * page, generator=rng)[:tokens]
    places[:2] = torch.tensor([-1, 3 * page])[: min(tokens, 2)]
    if (places[2:] == 3 * page).any():
        places[2:][places[2:] == 3 * page] = -1
    opened = torch.where(torch.rand(tokens, generator=rng) < 0.5, -1, torch.randperm(rows * page)[:1].expand(tokens))
    opened[opened >= 0] = torch.randperm(rows * page, generator=rng)[: int((opened >= 0).sum())]
    host = on_host(poisoned(pages, heads, per_page, 2, block, dim, device="cpu").to(dtype))
    if float8:
        host = on_host(torch.full((pages, heads, per_page, 2 * block * (dim + 1)), 0xFF, dtype=torch.uint8))
        k, v = (
            each * torch.randint(-6, 7, (tokens, 1, 1), generator=rng).exp2().to(dtype).to(DEVICE) for each in (k, v)
        )
    open_k, open_v = (poisoned(rows * page, heads, dim).to(dtype) for _ in range(2))
    slot_map = torch.randint(-1, 9, (heads, pages * per_page), generator=rng).int()
    want = [tensor.clone().cpu() for tensor in (host, open_k, open_v, slot_map)]
    for t, place in enumerate(places.tolist()):
        if place < 0:
            continue
        p, j, i = place // page, place % page // block, place % block
        if float8:
            for kind, new in enumerate((k[t].cpu(), v[t].cpu())):
                packed = pack_blocks(new[:, None, None].expand(-1, 2, 1, -1))
                first = (kind * block + i) * dim
                want[0][p, :, j, first : first + dim] = packed[:, :dim]
                want[0][p, :, j, (2 * dim + kind) * block + i] = packed[:, -1]
        else:
            want[0][p, :, j, 0, i], want[0][p, :, j, 1, i] = k[t].cpu(), v[t].cpu()
        if opened[t] >= 0:
            want[1][opened[t]], want[2][opened[t]] = k[t].cpu(), v[t].cpu()
        if place % page == 0:
            want[3][:, p * per_page : (p + 1) * per_page] = -1
    slot_map = slot_map.to(DEVICE)
    block_store(
        k,
        v,
        places.to(DEVICE),
        opened.int().to(DEVICE),
        slot_map,
        host=host,
        open_k=open_k,
        open_v=open_v,
        page_size=page,
        block_size=block,
        impl=impl,
    )
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    for got, expected in zip((host, open_k, open_v, slot_map), want, strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 32}, r"host has shape \[4, 2, 2, 2, 8, 64\]; needed: \[\*, 2, 4, 2, 8, 64\]"),
        ({"host": torch.zeros(4, 2, 2, 1024, dtype=torch.uint8)}, r"host has shape .*needed: \[\*, 2, 2, 1040\]"),
        ({"open_k": torch.zeros(20, 2, 64), "open_v": torch.zeros(20, 2, 64)}, "open_k has 20 tokens"),
        ({"host": torch.zeros(4, 2, 2, 2, 8, 64).half()}, "host has dtype torch.float16"),
    ],
)
def test_refuses(change, message):
    given = {
        "host": torch.zeros(4, 2, 2, 2, 8, 64),
        "open_k": torch.zeros(16, 2, 64),
        "open_v": torch.zeros(16, 2, 64),
        "page_size": 16,
        "block_size": 8,
    } | change
    k = torch.zeros(1, 2, 64)
    slots = torch.zeros(1, dtype=torch.int64)
    slot_map = torch.zeros(2, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        block_store(k, k, slots, slots.int(), slot_map, **given)
