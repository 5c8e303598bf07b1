import pytest
import torch
from factories import DEVICE, DTYPES, poisoned
from sparse_kernels import split_store


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_stores_values_of_all_tokens_and_keys_of_open_pages(impl, head_dim, tokens):
    rng = torch.Generator().manual_seed(tokens)
    dtype = DTYPES[0]
    # Views of what one projection made, as in a server.
    made = torch.randn(tokens, 6, head_dim, generator=rng).to(dtype).to(DEVICE)
    k, v = made[:, 1:3], made[:, 3:5]
    places = torch.randperm(48, generator=rng)[:tokens]
    opened = torch.randperm(32, generator=rng)[:tokens].int()
    places[1::4] = -1
    opened[2::4] = -1
    v_pool, open_keys = (poisoned(n, 2, head_dim).to(dtype) for n in (48, 32))
    split_store(k, v, places.to(DEVICE), opened.to(DEVICE), v_pool=v_pool, open_keys=open_keys, impl=impl)
    expected_v, expected_k = (poisoned(n, 2, head_dim).to(dtype) for n in (48, 32))
    for t in range(tokens):
        if places[t] >= 0:
            expected_v[places[t]] = v[t]
            if opened[t] >= 0:
                expected_k[opened[t]] = k[t]
    assert torch.equal(v_pool.view(torch.int16), expected_v.view(torch.int16))
    assert torch.equal(open_keys.view(torch.int16), expected_k.view(torch.int16))


def test_refuses():
    k = torch.zeros(2, 2, 64)
    pool = torch.zeros(16, 2, 64)
    with pytest.raises(ValueError, match=r"open_slots has dtype torch.int64"):
        split_store(k, k, torch.zeros(2).long(), torch.zeros(2).long(), v_pool=pool, open_keys=pool)
    with pytest.raises(ValueError, match=r"open_keys has shape \[16, 1, 64\]; needed: \[\*, 2, 64\]"):
        split_store(k, k, torch.zeros(2).long(), torch.zeros(2).int(), v_pool=pool, open_keys=pool[:, :1])
