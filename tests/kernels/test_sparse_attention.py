import inspect
import random

import pytest
import torch
import triton
import triton.language as tl
from factories import DEVICE, DTYPES, PagedCase, make_paged_case, poisoned, random_block_lists
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sparse_kernels import AttentionWorkspace, sparse_attention, sparse_attention_reference
from sparse_kernels import _attention_plan as plan

NATIVE = DEVICE == "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HALF = DTYPES[0]


def brute_force(
    case: PagedCase, lists: torch.Tensor | None, counts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each query head over exactly its row's tokens, and its log-sum-exp, in float64."""
    out = torch.zeros(case.q.shape, dtype=torch.float64, device=case.q.device)
    lse = torch.full(case.q.shape[:2], float("-inf"), dtype=torch.float64, device=case.q.device)
    group = case.group_size
    for b, length in enumerate(case.lengths):
        keys, values = case.keys(b).double(), case.values(b).double()
        for h in range(case.num_kv_heads):
            if lists is None:
                tokens = torch.arange(length)
            else:
                blocks = lists[b, h, : int(counts[b, h])].tolist()
                tokens = torch.tensor(
                    [t for j in blocks for t in range(j * case.block_size, (j + 1) * case.block_size) if t < length],
                    dtype=torch.int64,
                )
            if len(tokens) == 0:
                continue
            heads = slice(h * group, (h + 1) * group)
            tokens = tokens.to(case.q.device)
            scores = case.q[b, heads].double() @ keys[tokens, h].T * case.scale
            out[b, heads] = scores.softmax(-1) @ values[tokens, h]
            lse[b, heads] = scores.logsumexp(-1)
    return out, lse


def poisoned_workspace(case: PagedCase, num_programs: int | None) -> AttentionWorkspace:
    workspace = AttentionWorkspace.create(num_programs, case.group_size, case.head_dim, case.q.device)
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_max.fill_(float("nan"))
    workspace.partial_sum.fill_(float("nan"))
    return workspace


def attend(
    case: PagedCase,
    lists: torch.Tensor | None,
    counts: torch.Tensor | None,
    num_programs: int | None = 3,
    impl: str = "triton",
    workspace: AttentionWorkspace | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    out = poisoned(*case.q.shape, dtype=case.q.dtype, device=case.q.device)
    sparse_attention(
        case.q,
        case.k_pool,
        case.v_pool,
        case.page_table,
        case.seq_lens,
        lists,
        counts,
        scale=case.scale,
        page_size=case.page_size,
        block_size=case.block_size,
        out=out,
        workspace=workspace or poisoned_workspace(case, num_programs),
        lse=lse,
        impl=impl,
    )
    return out


def check(
    case: PagedCase, lists: torch.Tensor | None, counts: torch.Tensor | None, num_programs: int | None = 3
) -> None:
    expected, expected_lse = brute_force(case, lists, counts)
    tolerance = TOLERANCE[case.q.dtype]
    for impl in ("torch", "triton"):
        lse = poisoned(*case.q.shape[:2], device=case.q.device)
        out = attend(case, lists, counts, num_programs, impl, lse=lse)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4, msg=lambda m: f"{impl}: {m}")  # noqa: B023
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{impl}: {m}")  # noqa: B023


def skewed_block_lists(case: PagedCase, kept: list[list[float]], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists with a share of blocks chosen for each row, 0 for none."""
    lists, counts = random_block_lists(case, 0.0, seed)
    lists.fill_(poisoned(1, dtype=torch.int32, device="cpu").item())
    rng = random.Random(seed)
    for b in range(case.batch):
        for h in range(case.num_kv_heads):
            count = round(kept[b][h] * case.blocks(b))
            chosen = sorted(rng.sample(range(case.blocks(b)), count))
            lists[b, h, :count] = torch.tensor(chosen, dtype=torch.int32)
            counts[b, h] = count
    return lists, counts


# lengths, KV heads, G, D, page, block, programs, density (None: every block, no list)
SHAPES = [
    ([1], 1, 1, 64, 16, 8, 1, None),
    ([1, 0, 64, 65], 2, 4, 64, 16, 16, 3, 0.5),
    ([130, 3], 1, 3, 96, 32, 16, 2, 0.6),
    ([190, 0], 2, 7, 128, 64, 16, 7, 0.5),
    ([257], 1, 8, 128, 64, 64, 3, 0.7),
    ([200, 1], 1, 9, 64, 128, 32, 5, None),
    ([129, 64], 1, 16, 256, 16, 8, 3, 0.4),
    ([0, 0, 70, 0, 1], 1, 2, 64, 64, 8, 64, 0.3),
    ([63, 64, 65, 127, 128, 129], 1, 1, 64, 64, 32, 4, None),
    ([300], 1, 4, 128, 128, 64, 17, None),
]
# Each of these takes one of the dtypes in turn: the interpreter is slow, and so is compiling.
SHAPES_AND_DTYPES = [(*shape, DTYPES[i % 2]) for i, shape in enumerate(SHAPES)]
if NATIVE:
    LARGER_SHAPES = [
        ([5000, 17, 0, 12345], 8, 4, 128, 64, 16, None, 0.3),
        ([3000] * 9, 4, 7, 128, 32, 8, None, 0.1),
        ([2049, 4097], 8, 16, 256, 128, 64, None, 0.5),
        ([8191], 3, 3, 64, 16, 16, 1000, 0.2),
        ([1023, 1025, 1], 2, 5, 96, 64, 32, None, None),
    ]
    SHAPES_AND_DTYPES += [(*shape, dtype) for shape in LARGER_SHAPES for dtype in DTYPES]


@pytest.mark.parametrize(
    ("lengths", "heads", "group", "dim", "page", "block", "programs", "density", "dtype"), SHAPES_AND_DTYPES
)
def test_matches_brute_force(lengths, heads, group, dim, page, block, programs, density, dtype):
    case = make_paged_case(
        lengths,
        num_kv_heads=heads,
        group_size=group,
        head_dim=dim,
        page_size=page,
        block_size=block,
        dtype=dtype,
        shared_pages=1,
    )
    lists, counts = (None, None) if density is None else random_block_lists(case, density)
    check(case, lists, counts, programs)


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 64])
def test_skewed_rows_and_any_number_of_programs(programs):
    """One long row spans programs, many short ones share one, some are empty although their request is not."""
    case = make_paged_case([450, 20, 0, 33], group_size=3, dtype=HALF)
    lists, counts = skewed_block_lists(case, [[1.0, 0.02], [0.0, 1.0], [0.0, 0.0], [0.4, 0.0]])
    check(case, lists, counts, programs)


@pytest.mark.parametrize("programs", [2, 4, 8])
def test_shares_that_end_with_rows(programs):
    """Four rows of exactly two tiles: two or four programs share no row, so no part is written; eight share all."""
    case = make_paged_case([256, 256], block_size=16, dtype=torch.float32)
    lists, counts = skewed_block_lists(case, [[0.5, 0.5], [0.5, 0.5]])
    tile = plan.tile_config(case.head_dim, case.q.dtype).tile
    assert plan.tiles_per_row(case.seq_lens[:2], counts, 2, block_size=16, tile=tile) == [2] * 4
    workspace = poisoned_workspace(case, programs)
    out = attend(case, lists, counts, workspace=workspace)
    torch.testing.assert_close(out.double(), brute_force(case, lists, counts)[0], rtol=2e-5, atol=2e-5)
    assert workspace.partial_sum.isnan().all() == (programs <= 4)


def test_no_list_means_every_block():
    case = make_paged_case([200, 0, 17], dtype=HALF)
    lists, counts = skewed_block_lists(case, [[1.0] * 2] * 3)
    for impl in ("torch", "triton"):
        assert torch.equal(attend(case, None, None, impl=impl), attend(case, lists, counts, impl=impl)), impl


def test_only_empty_rows():
    case = make_paged_case([0, 0, 0], dtype=HALF)
    lists, counts = random_block_lists(case, 0.5)
    workspace = poisoned_workspace(case, 3)
    for impl in ("torch", "triton"):
        assert (attend(case, lists, counts, impl=impl, workspace=workspace) == 0).all(), impl
        assert (attend(case, None, None, impl=impl, workspace=workspace) == 0).all(), impl
    assert workspace.partial_out.isnan().all()


def test_counts_left_over_in_empty_rows_are_ignored():
    case = make_paged_case([70, 0, 40], dtype=HALF)
    lists, counts = random_block_lists(case, 0.5)
    expected, _ = brute_force(case, lists, counts)
    counts[1] = 1000
    for impl in ("torch", "triton"):
        torch.testing.assert_close(attend(case, lists, counts, impl=impl).double(), expected, rtol=4e-3, atol=4e-3)


def test_listed_blocks_beyond_the_request_are_skipped():
    """Neither their page-table entries nor their tokens may be read."""
    case = make_paged_case([100, 40], dtype=HALF)
    lists, counts = skewed_block_lists(case, [[0.3, 0.3], [0.4, 0.4]])
    expected, _ = brute_force(case, lists, counts)
    for b in range(case.batch):
        for h, beyond in enumerate((case.blocks(b), 2**27)):
            lists[b, h, counts[b, h]] = beyond
    counts += 1
    for impl in ("torch", "triton"):
        torch.testing.assert_close(attend(case, lists, counts, impl=impl).double(), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("programs", [1, 5])
def test_huge_logits(programs):
    """Scores of +-1e9: one token takes everything, equal ones share evenly; nothing overflows, no NaN."""
    case = make_paged_case([150, 150], num_kv_heads=1, dtype=torch.float32)
    case.q.fill_(3e4)
    case.scale = 1.0
    case.k_pool[case.slots(0)] = -600.0
    case.k_pool[case.slots(0)[137]] = 600.0
    case.k_pool[case.slots(1)] = -600.0
    expected = torch.stack([case.values(0)[137, 0], case.values(1)[:, 0].mean(0)])
    for impl in ("torch", "triton"):
        out = attend(case, None, None, programs, impl)
        torch.testing.assert_close(out, expected[:, None].expand_as(out), rtol=1e-4, atol=1e-4)


def test_strided_arguments():
    """q as a slice of a fused projection, pools that hold K and V of a token together, larger static buffers."""
    case = make_paged_case([100, 40], dtype=HALF)
    lists, counts = random_block_lists(case, 0.5)
    expected, _ = brute_force(case, lists, counts)
    batch, heads, dim = case.q.shape
    case.q = torch.cat([case.q, poisoned(batch, 3, dim, dtype=HALF)], 1)[:, :heads]
    fused = torch.cat([case.k_pool, case.v_pool], 1)
    case.k_pool, case.v_pool = fused.split(case.num_kv_heads, 1)
    wide = poisoned(5, case.q.shape[1] // 2, case.capacity + 3, dtype=torch.int32)
    wide[:batch, :, : case.capacity] = lists
    many = poisoned(5, counts.shape[1], dtype=torch.int32)
    many[:batch] = counts
    target = poisoned(batch, heads + 1, dim, dtype=HALF)
    for impl in ("torch", "triton"):
        target.fill_(float("nan"))
        sparse_attention(
            case.q,
            case.k_pool,
            case.v_pool,
            case.page_table,
            case.seq_lens,
            wide,
            many,
            scale=case.scale,
            page_size=case.page_size,
            block_size=case.block_size,
            out=target[:, :heads],
            workspace=poisoned_workspace(case, 2),
            impl=impl,
        )
        torch.testing.assert_close(target[:, :heads].double(), expected, rtol=4e-3, atol=4e-3)
        assert target[:, heads:].isnan().all()


# Few on a GPU, where each takes seconds to compile.
GEOMETRIES = [
    (page, block, dim, dtype)
    for page in (16, 32, 64, 128)
    for block in (8, 16, 32, 64)
    for dim in (64, 96, 128, 256)
    for dtype in DTYPES
    if block <= page and (not NATIVE or (page, block, dim) in [(16, 8, 64), (64, 16, 128), (128, 64, 128)])
]


@settings(
    max_examples=150 if NATIVE else 10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_random_shapes(data):
    page, block, dim, dtype = data.draw(st.sampled_from(GEOMETRIES), "page, block, head dimension, dtype")
    longest = 3000 if NATIVE else 150
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=1, max_size=9 if NATIVE else 3), "lengths")
    case = make_paged_case(
        lengths,
        num_kv_heads=data.draw(st.integers(2, 5) if NATIVE else st.integers(1, 2), "heads"),
        group_size=data.draw(st.sampled_from([1, 4, 7]), "group"),
        head_dim=dim,
        page_size=page,
        block_size=block,
        dtype=dtype,
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    share = st.sampled_from([0.0, 0.1, 0.5, 1.0])
    row = st.lists(share, min_size=case.num_kv_heads, max_size=case.num_kv_heads)
    kept = data.draw(st.lists(row, min_size=case.batch, max_size=case.batch), "kept")
    lists, counts = skewed_block_lists(case, kept)
    check(case, lists, counts, data.draw(st.integers(1, 300 if NATIVE else 8), "programs"))


def test_dense_reference_equals_torch_native_backend():
    """The computation of SGLang's `torch_native` backend, bit for bit: greedy tokens must not differ."""
    case = make_paged_case([77, 33], group_size=3, dtype=torch.float32)
    lists, counts = skewed_block_lists(case, [[1.0] * 2] * 2)
    for arguments in ((None, None), (lists, counts)):
        out = attend(case, *arguments, impl="torch")
        for b in range(case.batch):
            query = case.q.movedim(0, 1)[:, b : b + 1]
            keys = case.k_pool[case.slots(b)].movedim(0, 1)
            values = case.v_pool[case.slots(b)].movedim(0, 1)
            expected = torch.nn.functional.scaled_dot_product_attention(
                query[None], keys[None], values[None], enable_gqa=True, scale=case.scale, is_causal=False
            )
            assert torch.equal(out[b], expected[0, :, 0])


@triton.jit
def _share_kernel(
    seq_lens,
    counts,
    out,
    num_rows,
    num_programs,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    begin, end, row, before = plan.program_share(
        program,
        num_programs,
        num_rows,
        num_kv_heads,
        seq_lens,
        counts,
        BLOCK_SIZE,
        PAGE_SIZE,
        TILE,
        TAIL_TILE,
        HAS_LISTS,
        ROWS,
    )
    tl.store(out + program * 4, begin)
    tl.store(out + program * 4 + 1, end)
    tl.store(out + program * 4 + 2, row)
    tl.store(out + program * 4 + 3, before)


@pytest.mark.parametrize(("batch", "longest", "programs"), [(700, 300, 7), (700, 20, 3), (9, 100, 64), (5, 0, 2)])
@pytest.mark.parametrize(("has_lists", "tail_tile"), [(True, 0), (True, 32), (False, 0)])
def test_plan_covers_all_tiles_in_equal_shares(batch, longest, programs, has_lists, tail_tile):
    """Against a plain walk over the tiles: more rows than one load takes, empty rows, fewer tiles than programs."""
    rng = torch.Generator().manual_seed(batch + longest)
    seq_lens = torch.randint(0, longest + 1, (batch,), generator=rng, dtype=torch.int32)
    seq_lens[torch.rand(batch, generator=rng) < 0.3] = 0
    counts = torch.randint(0, longest // 8 + 2, (batch, 3), generator=rng, dtype=torch.int32)
    counts[torch.rand(batch, 3, generator=rng) < 0.3] = 0
    sizes = {"block_size": 8, "page_size": 16, "tile": 64, "tail_tile": tail_tile}
    tiles = plan.tiles_per_row(seq_lens, counts if has_lists else None, 3, **sizes)
    rows_of_tiles = [row for row, n in enumerate(tiles) for _ in range(n)]
    shares = poisoned(programs, 4, dtype=torch.int32)
    _share_kernel[(programs,)](
        seq_lens.to(DEVICE),
        counts.to(DEVICE) if has_lists else None,
        shares,
        3 * batch,
        programs,
        3,
        BLOCK_SIZE=8,
        PAGE_SIZE=16,
        TILE=64,
        TAIL_TILE=tail_tile,
        HAS_LISTS=has_lists,
        ROWS=plan.PLAN_ROWS,
    )
    shares = shares.tolist()
    total, working = len(rows_of_tiles), min(programs, len(rows_of_tiles))
    assert [t for begin, end, _, _ in shares for t in range(begin, end)] == list(range(total))
    sizes = [end - begin for begin, end, _, _ in shares]
    assert max(sizes[:working], default=0) - min(sizes[:working], default=0) <= 1
    assert sizes[working:] == [0] * (programs - working)
    for begin, _, row, before in shares[:working]:
        assert row == rows_of_tiles[begin]
        assert before == sum(tiles[:row])


def test_tile_holds_the_largest_block():
    """Otherwise a tile of a short last block would hold no readable token."""
    for dtype in (torch.float16, torch.float32):
        for dim in (64, 96, 128, 256):
            assert plan.tile_config(dim, dtype).tile >= 64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda a: a.update(q=a["q"][:, :3]), "q"),
        (lambda a: a.update(q=a["q"].double()), "q"),
        (lambda a: a.update(v_pool=a["v_pool"][:, :1]), "v_pool"),
        (lambda a: a.update(page_table=a["page_table"][:1]), "page_table"),
        (lambda a: a.update(seq_lens=a["seq_lens"].long()), "seq_lens"),
        (lambda a: a.update(block_counts=None), "block_counts"),
        (lambda a: a.update(block_lists=a["block_lists"][:, :1]), "block_lists"),
        (lambda a: a.update(block_size=12), "block_size"),
        (lambda a: a.update(out=a["out"].float()), "out"),
        (lambda a: a.update(workspace=AttentionWorkspace.create(1, 5, 64, DEVICE)), "workspace"),
    ],
)
def test_errors_name_the_argument(change, named):
    case = make_paged_case([20, 10], dtype=torch.float16)
    lists, counts = random_block_lists(case, 0.5)
    arguments = {
        "q": case.q,
        "k_pool": case.k_pool,
        "v_pool": case.v_pool,
        "page_table": case.page_table,
        "seq_lens": case.seq_lens,
        "block_lists": lists,
        "block_counts": counts,
        "scale": case.scale,
        "page_size": case.page_size,
        "block_size": case.block_size,
        "out": torch.empty_like(case.q),
        "workspace": poisoned_workspace(case, 1),
    }
    sparse_attention(**arguments)
    change(arguments)
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        sparse_attention(**arguments)


def test_workspace_size():
    workspace = AttentionWorkspace.create(5, 4, 128, DEVICE)
    assert workspace.partial_out.shape == (10, 4, 128)
    assert workspace.partial_max.shape == workspace.partial_sum.shape == (10, 4)
    assert workspace.nbytes == 10 * 4 * (128 + 2) * 4
    with pytest.raises(ValueError, match="num_programs"):
        AttentionWorkspace.create(0, 4, 128, DEVICE)
    with pytest.raises(ValueError, match="group_size"):
        AttentionWorkspace.create(1, 17, 128, DEVICE)


@pytest.mark.gpu
@pytest.mark.skipif(not NATIVE, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_batch_matches_reference(dtype):
    case = make_paged_case(
        [20000, 1, 0, 7777, 130, 64000], num_kv_heads=8, group_size=4, head_dim=128, page_size=64, dtype=dtype
    )
    case.block_size = 16
    for lists, counts in ((None, None), random_block_lists(case, 0.3)):
        expected = attend(case, lists, counts, impl="torch")
        out = attend(case, lists, counts, None)
        torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(not NATIVE, reason="needs a CUDA device")
@pytest.mark.parametrize("with_lists", [True, False])
def test_graph_replays_with_other_lengths_lists_and_pages(with_lists):
    """One capture serves any lengths, lists and page tables that are written into the same buffers, none included."""
    batch, dtype = 4, torch.bfloat16
    shapes = [[3000, 500, 0, 64], [1, 2, 3, 4], [0, 0, 0, 0], [0, 2999, 3000, 0], [3000] * batch]
    cases = [
        make_paged_case(lengths, group_size=4, head_dim=128, dtype=dtype, seed=i) for i, lengths in enumerate(shapes)
    ]
    slots = max(case.k_pool.shape[0] for case in cases)
    columns = max(case.page_table.shape[1] for case in cases)
    q = torch.empty_like(cases[0].q)
    pools = [torch.empty(slots, 2, 128, dtype=dtype, device=DEVICE) for _ in range(2)]
    page_table = torch.empty(batch, columns, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.empty(batch, dtype=torch.int32, device=DEVICE)
    lists = torch.empty(batch, 2, columns * 2, dtype=torch.int32, device=DEVICE)
    counts = torch.empty(batch, 2, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(q)
    workspace = poisoned_workspace(cases[0], None)

    def fill(case: PagedCase) -> None:
        q.copy_(case.q)
        for static, pool in zip(pools, (case.k_pool, case.v_pool), strict=True):
            static.fill_(float("nan"))
            static[: pool.shape[0]] = pool
        page_table.fill_(2**30)
        page_table[:, : case.page_table.shape[1]] = case.page_table[:batch]
        seq_lens.copy_(case.seq_lens[:batch])
        chosen, number = random_block_lists(case, 0.4)
        lists.fill_(2**30)
        lists[:, :, : chosen.shape[2]] = chosen
        counts.copy_(number)
        out.fill_(float("nan"))

    def step() -> None:
        sparse_attention(
            q,
            pools[0],
            pools[1],
            page_table,
            seq_lens,
            lists if with_lists else None,
            counts if with_lists else None,
            scale=cases[0].scale,
            page_size=16,
            block_size=8,
            out=out,
            workspace=workspace,
        )

    fill(cases[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in [*cases, *cases[::-1]]:
        fill(case)
        graph.replay()
        expected, _ = brute_force(case, lists if with_lists else None, counts if with_lists else None)
        torch.testing.assert_close(out.double(), expected, rtol=3e-2, atol=3e-2)


def test_reference_and_operation_have_the_same_arguments():
    operation = list(inspect.signature(sparse_attention).parameters)
    operation.remove("impl")
    assert list(inspect.signature(sparse_attention_reference).parameters) == operation
