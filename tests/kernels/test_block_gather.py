import pytest
import torch
from factories import DEVICE, poisoned
from sparse_kernels import block_gather

IMPLS = ["torch", "triton"]


def on_host(tensor):
    return tensor.pin_memory() if DEVICE == "cuda" else tensor


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("block", "dtype", "count", "programs"),
    [
        ((2, 16, 64), torch.float16, 11, 4),
        ((2, 8, 96), torch.bfloat16, 5, 32),
        ((2, 16, 128), torch.float32, 1, 2),
        ((16,), torch.uint8, 30, 3),
        ((2, 8, 64), torch.float32, 0, 2),
    ],
)
def test_listed_blocks_are_copied_and_no_others(impl, block, dtype, count, programs):
    rng = torch.Generator().manual_seed(count)
    source = torch.randint(0, 200, (40, *block), generator=rng).to(dtype)
    target = poisoned(35, *block, dtype=dtype)
    come_from = torch.randint(0, 40, (33,), generator=rng).int()
    go_to = torch.randperm(35, generator=rng)[:33].int()
    expected = target.clone().cpu()
    expected[go_to[:count].long()] = source[come_from[:count].long()]
    # What lies beyond the count must not be followed.
    come_from[count:], go_to[count:] = 2**30, 2**30
    n = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    block_gather(on_host(source), target, come_from.to(DEVICE), go_to.to(DEVICE), n, programs=programs, impl=impl)
    torch.testing.assert_close(target.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_a_replay_reads_the_count_anew():
    source = on_host(torch.randn(100, 2, 16, 128).to(torch.bfloat16))
    target = torch.zeros(100, 2, 16, 128, dtype=torch.bfloat16, device="cuda")
    index = torch.randperm(100).int().cuda()
    n = torch.zeros(1, dtype=torch.int32, device="cuda")
    block_gather(source, target, index, index, n)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block_gather(source, target, index, index, n)
    for count in (3, 100):
        n.fill_(count)
        target.zero_()
        graph.replay()
        expected = torch.zeros_like(target)
        expected[index[:count].long()] = source.cuda()[index[:count].long()]
        assert torch.equal(target, expected)


def test_empty_pools_are_left_alone():
    nothing = torch.zeros(0, 2, 8, 64)
    some = torch.zeros(3, 2, 8, 64)
    n = torch.ones(1, dtype=torch.int32)
    block_gather(some, nothing, n, n, n)
    block_gather(nothing, some, n, n, n)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(4, 3)}, r"target has shape \[4, 3\]; needed: \[\*, 8\]"),
        ({"source": torch.zeros(4, 6).half(), "target": torch.zeros(4, 6).half()}, "source has blocks of 12 bytes"),
        ({"count": torch.zeros(1)}, "count has dtype torch.float32"),
        ({"programs": 0}, "programs is 0; needed: at least 1"),
    ],
)
def test_refuses(change, message):
    index = torch.zeros(1, dtype=torch.int32)
    given = {"source": torch.zeros(4, 8), "target": torch.zeros(4, 8), "count": index, "programs": 1} | change
    source, target = given.pop("source"), given.pop("target")
    with pytest.raises(ValueError, match=message):
        block_gather(source, target, index, index, **given)
