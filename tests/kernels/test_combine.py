import pytest
import torch
from factories import DEVICE, DTYPES, poisoned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sparse_kernels import AttentionWorkspace
from sparse_kernels import _attention_plan as plan
from sparse_kernels.combine import PARTS, combine

NATIVE = DEVICE == "cuda"
BLOCK, TILE = 16, 64


def parts_of_rows(tiles: list[int], num_programs: int) -> list[list[int]]:
    """Workspace entries of each row's parts, from dealing the tiles out one by one; one entry or none if not shared."""
    total = sum(tiles)
    working = min(num_programs, total)
    owner = [i for i in range(working) for _ in range(i * total // working, (i + 1) * total // working)]
    parts, at = [], 0
    for n in tiles:
        programs = sorted(set(owner[at : at + n]))
        parts.append([2 * i + (i == programs[0]) for i in programs])
        at += n
    return parts


def random_parts(num_programs: int, group: int, dim: int, spread: float) -> AttentionWorkspace:
    workspace = AttentionWorkspace.create(num_programs, group, dim, DEVICE)
    rng = torch.Generator().manual_seed(num_programs + dim)
    workspace.partial_out.copy_(torch.randn(workspace.partial_out.shape, generator=rng))
    workspace.partial_max.copy_(torch.randn(workspace.partial_max.shape, generator=rng) * spread)
    workspace.partial_sum.copy_(1 + torch.rand(workspace.partial_sum.shape, generator=rng) * 50)
    return workspace


def check(
    tiles: list[int],
    num_programs: int,
    *,
    heads: int = 1,
    group: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    spread: float = 3.0,
    has_lists: bool = True,
) -> None:
    """`tiles` holds each row's tiles, row-major `[B, heads]`; compares both implementations with a float64 merge."""
    batch = len(tiles) // heads
    # One block short of full tiles, so that tiles are rounded up.
    blocks = torch.tensor(tiles, dtype=torch.int32).view(batch, heads) * (TILE // BLOCK)
    blocks = torch.where(blocks > 0, blocks - 1, 0)
    seq_lens = blocks.amax(1) * BLOCK
    counts = blocks.to(DEVICE) if has_lists else None
    workspace = random_parts(num_programs, group, dim, spread)
    parts = parts_of_rows(tiles, num_programs)
    unused = sorted(set(range(2 * num_programs)) - {entry for row in parts if len(row) > 1 for entry in row})
    for tensor in (workspace.partial_out, workspace.partial_max, workspace.partial_sum):
        tensor[unused] = float("nan")
    for impl in ("torch", "triton"):
        out = poisoned(batch, heads * group, dim, dtype=dtype)
        combine(workspace, seq_lens.to(DEVICE), counts, block_size=BLOCK, tile=TILE, out=out, impl=impl)
        for row, entries in enumerate(parts):
            b, h = divmod(row, heads)
            result = out[b, h * group : (h + 1) * group]
            if not entries:
                assert (result == 0).all(), (impl, row)
            elif len(entries) == 1:
                assert result.isnan().all(), (impl, row)
            else:
                highest = workspace.partial_max[entries].double()
                weights = torch.exp2(highest - highest.amax(0))
                total = (weights * workspace.partial_sum[entries].double()).sum(0)
                expected = (weights[:, :, None] * workspace.partial_out[entries].double()).sum(0) / total[:, None]
                tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
                torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_whole_and_empty_rows(dtype):
    check([5, 0, 1, 1, 7, 3], 4, heads=2, dtype=dtype)


@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 96), (16, 256), (4, 128)])
def test_groups_and_head_dimensions(group, dim):
    check([3], 3, group=group, dim=dim)


def test_row_over_more_programs_than_one_load_takes():
    programs = 2 * PARTS + 5
    check([programs, 2], programs, group=8)


@pytest.mark.parametrize("spread", [0.0, 1e5])
def test_equal_and_very_different_maxima(spread):
    check([6, 6], 6, spread=spread)


def test_without_lists_rows_follow_the_lengths():
    check([4, 4, 0, 0, 3, 3], 5, heads=2, has_lists=False)


def test_only_empty_rows():
    check([0, 0, 0], 3)


def test_more_rows_than_one_load_takes(monkeypatch):
    monkeypatch.setattr(plan, "PLAN_ROWS", 16)
    check([1, 0, 3] * 7 + [0] * 20 + [5], 3, group=1)


def test_fewer_tiles_than_programs():
    check([1, 2, 0, 1], 64)


@settings(
    max_examples=100 if NATIVE else 8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    tiles=st.lists(st.integers(0, 9), min_size=1, max_size=12 if NATIVE else 5),
    num_programs=st.integers(1, 40),
    group=st.integers(1, 3),
    has_lists=st.booleans(),
)
def test_any_plan(tiles, num_programs, group, has_lists):
    check(tiles, num_programs, group=group, has_lists=has_lists)


def test_errors_name_the_argument():
    workspace = AttentionWorkspace.create(2, 2, 64, DEVICE)
    seq_lens = torch.tensor([10, 10], dtype=torch.int32, device=DEVICE)
    counts = torch.ones(2, 2, dtype=torch.int32, device=DEVICE)
    for argument, out, lengths, numbers in [
        ("out", poisoned(2, 3, 64), seq_lens, counts),
        ("workspace", poisoned(2, 4, 96), seq_lens, counts),
        ("seq_lens", poisoned(3, 4, 64), seq_lens, counts),
        ("block_counts", poisoned(2, 4, 64), seq_lens, counts[:, :1]),
    ]:
        with pytest.raises(ValueError, match=argument):
            combine(workspace, lengths, numbers, block_size=BLOCK, tile=TILE, out=out)
