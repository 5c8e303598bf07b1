"""The fused pass against float64 attention over the sets that it kept, and those sets against their definition."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from factories import DEVICE, DTYPES, make_paged_case, poisoned
from mass_cases import over_dtypes, over_impls, over_shapes
from oracles import dequantised
from sparse_kernels import (
    FusedWorkspace,
    SelectionTap,
    TapPoint,
    block_statistics,
    fused_rows_are_aligned,
    fused_top_delta,
    thumbnail,
)
from sparse_kernels._fused_plan import row_page
from sparse_kernels._fused_shares import aligned, aligned_range, find_row, fits, program_range

SINK, WINDOW = 5, 20


class Fused:
    """A case with everything that the operation takes, and what it gave."""

    def __init__(
        self,
        case,
        *,
        bits=4,
        symmetric=False,
        delta=2.0,
        tail=False,
        min_context=0,
        num_programs=None,
        window=WINDOW,
        last_kept=False,
    ):
        self.case, self.bits, self.min_context, self.window = case, bits, min_context, window
        heads = case.num_kv_heads
        self.delta = torch.full((case.batch, heads), float(delta), device=DEVICE)
        page_bytes = case.head_dim * bits // 8
        self.codes = poisoned(case.num_pages, heads, case.page_size, page_bytes, dtype=torch.uint8)
        self.low_step = poisoned(case.num_pages, heads, 2, case.head_dim, dtype=torch.bfloat16)
        pages = case.closed_pages()
        thumbnail(
            case.k_pool,
            pages,
            bits=bits,
            page_size=case.page_size,
            codes=self.codes,
            low_step=self.low_step,
            symmetric=symmetric,
        )
        self.cell = min(64, case.page_size)
        self.means = None
        if tail:
            cells = case.page_size // self.cell
            self.means = poisoned(case.num_pages, heads, cells, case.head_dim, dtype=case.v_pool.dtype)
            block_statistics(
                case.v_pool,
                pages,
                kind="mean",
                page_size=case.page_size,
                block_size=self.cell,
                out=self.means[:, :, :, None],
            )
        self.workspace = FusedWorkspace.create(
            heads,
            case.group_size,
            case.head_dim,
            case.q.dtype,
            page_size=case.page_size,
            block_size=case.block_size,
            device=DEVICE,
            cells=case.page_size // self.cell,
            rows=case.batch * heads,
            num_programs=num_programs,
        )
        self.out = poisoned(*case.q.shape, dtype=case.q.dtype)
        self.lse = poisoned(*case.q.shape[:2])
        self.counts = poisoned(case.batch, heads, dtype=torch.int32)
        self.kept_total = torch.zeros(heads, dtype=torch.int64, device=DEVICE)
        self.last_kept = poisoned(case.batch + 1, heads, dtype=torch.int32) if last_kept else None

    def run(self, impl, tap=None):
        c = self.case
        for name in ("notes", "kept_bits", "slots", "dropped", "counts", "spans"):
            tensor = getattr(self.workspace, name)
            tensor.copy_(poisoned(*tensor.shape, dtype=tensor.dtype))
        fused_top_delta(
            c.q,
            c.k_pool,
            c.v_pool,
            self.codes,
            self.low_step,
            c.page_table,
            c.seq_lens,
            delta=self.delta,
            bits=self.bits,
            scale=c.scale,
            page_size=c.page_size,
            block_size=c.block_size,
            sink_tokens=SINK,
            window_tokens=self.window,
            min_context=self.min_context,
            out=self.out,
            block_counts=self.counts,
            workspace=self.workspace,
            value_means=self.means,
            lse=self.lse,
            kept_total=self.kept_total,
            last_kept=self.last_kept,
            tap=tap,
            impl=impl,
        )
        return self

    def kept(self, impl):
        """Blocks that the operation keeps, `[B][Hkv]` lists, told by its tap."""
        c = self.case
        tap = SelectionTap.create(
            kv_heads=c.num_kv_heads,
            group_size=c.group_size,
            head_dim=c.head_dim,
            capacity=c.capacity,
            dtype=c.q.dtype,
            device=DEVICE,
        )
        lists = []
        for b, length in enumerate(c.lengths):
            tap.arm(3, b)
            self.run(impl, TapPoint(tap, 3, c.q))
            assert tap.seq_len.item() == length
            if length:
                torch.testing.assert_close(tap.q, c.q[b])
            assert torch.equal(tap.block_counts, self.counts[b])
            lists.append([sorted(tap.block_lists[h, : tap.block_counts[h]].tolist()) for h in range(c.num_kv_heads)])
        return lists


def scores_of(fused, b, h):
    """Scores `[G, length]` float64 of request `b`: exact ones, and those by the thumbnails of closed pages."""
    c = fused.case
    q = c.q[b].double().view(c.num_kv_heads, c.group_size, -1)[h]
    exact = q @ c.keys(b)[:, h].double().T * c.scale
    closed = c.lengths[b] // c.page_size
    pages = c.page_table[b, :closed].long()
    keys = dequantised(fused.codes[pages, h], fused.low_step[pages, h], fused.bits, c.head_dim).flatten(0, 1)
    estimated = exact.clone()
    estimated[:, : closed * c.page_size] = q @ keys.T * c.scale
    return exact, estimated


def is_forced(fused, b):
    """Which tokens are in forced blocks, `[length]` bool."""
    c, length = fused.case, fused.case.lengths[b]
    tokens = torch.arange(length, device=DEVICE)
    asked = (tokens < SINK) | (tokens >= length - fused.window) | (tokens >= length // c.page_size * c.page_size)
    return torch.isin(tokens // c.block_size, (tokens // c.block_size)[asked])


def check_kept(fused, kept, margin):
    """Each block whose largest score is not within `margin` of the threshold is kept or not, as it should be."""
    c = fused.case
    for b, length in enumerate(c.lengths):
        for h in range(c.num_kv_heads):
            blocks = list(range(c.blocks(b)))
            if length == 0 or length < fused.min_context or not fused.delta[b, h] < math.inf:
                assert kept[b][h] == blocks
                continue
            exact, estimated = scores_of(fused, b, h)
            forced = is_forced(fused, b)
            least = exact[:, forced].amax(1, keepdim=True) - fused.delta[b, h]
            above = (estimated - least).amax(0)
            for j in blocks:
                tokens = slice(j * c.block_size, (j + 1) * c.block_size)
                distance = above[tokens].max().item()
                if forced[tokens].any() or distance > margin:
                    assert j in kept[b][h]
                elif distance < -margin:
                    assert j not in kept[b][h]


def expected_attention(fused, kept):
    """Float64 attention over the kept blocks and the tail; and its log-sum-exp."""
    c = fused.case
    out = torch.zeros(*c.q.shape, dtype=torch.float64, device=DEVICE)
    lse = torch.full(c.q.shape[:2], -math.inf, dtype=torch.float64, device=DEVICE)
    for b, length in enumerate(c.lengths):
        if length == 0:
            continue
        values = c.values(b).double()
        for h in range(c.num_kv_heads):
            exact, estimated = scores_of(fused, b, h)
            block_of = torch.arange(length, device=DEVICE) // c.block_size
            is_kept = torch.isin(block_of, torch.tensor(kept[b][h], device=DEVICE))
            scores, v = exact.clone(), values[:, h].clone()
            if fused.means is None:
                scores[:, ~is_kept] = -math.inf
            else:
                scores[:, ~is_kept] = estimated[:, ~is_kept]
                for start in range(0, length, fused.cell):
                    cell = slice(start, start + fused.cell)
                    v[cell] = torch.where(is_kept[cell, None], v[cell], v[cell].mean(0))
            heads = slice(h * c.group_size, (h + 1) * c.group_size)
            out[b, heads] = scores.softmax(-1) @ v
            lse[b, heads] = scores.logsumexp(-1)
    return out, lse


def check(fused, impl):
    native = DEVICE == "cuda"
    kept = fused.kept(impl)
    check_kept(fused, kept, 0.1 if native else 1e-3)
    assert fused.counts.tolist() == [[len(row) for row in rows] for rows in kept]
    runs = fused.case.batch
    for h in range(fused.case.num_kv_heads):
        assert fused.kept_total[h].item() == runs * sum(len(rows[h]) for rows in kept)
    out, lse = expected_attention(fused, kept)
    half = fused.case.q.dtype != torch.float32
    torch.testing.assert_close(fused.out.double(), out, atol=2e-2 if half else 1e-4, rtol=1e-2)
    torch.testing.assert_close(fused.lse.double(), lse, atol=3e-2 if native else 2e-3, rtol=1e-3)


@over_impls
@over_shapes
@pytest.mark.parametrize(("dtype", "tail"), list(zip(DTYPES, [True, False], strict=True)), ids=str)
def test_ragged_batches(impl, page_size, block_size, head_dim, group_size, dtype, tail):
    lengths = [0, page_size, 2 * page_size + block_size // 2]
    if DEVICE == "cuda":
        lengths += [1, page_size - 1, 37 * page_size + 3, 0, 0, 19 * page_size]
    sizes = {"page_size": page_size, "block_size": block_size, "head_dim": head_dim, "group_size": group_size}
    check(Fused(make_paged_case(lengths, dtype=dtype, **sizes), tail=tail), impl)


@over_impls
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("head_dim", [64, 96])
@over_dtypes
def test_fewer_bits(impl, bits, head_dim, dtype):
    case = make_paged_case([150, 0, 70], group_size=3, head_dim=head_dim, page_size=32, block_size=16, dtype=dtype)
    check(Fused(case, bits=bits, tail=True), impl)


@over_impls
@over_shapes
@pytest.mark.parametrize(("delta", "dtype"), list(zip([0.5, 3.0], DTYPES, strict=True)), ids=str)
def test_ffds_symmetric_codes(impl, page_size, block_size, head_dim, group_size, dtype, delta):
    """Keys with large biases in half of the channels, for which these codes are coarsest; and a newest key that points
    where the queries do, so that not everything comes near it."""
    lengths = [0, page_size, 3 * page_size + block_size // 2, 1]
    if DEVICE == "cuda":
        lengths += [129 * page_size - 1, 19 * page_size]
    sizes = {"page_size": page_size, "block_size": block_size, "head_dim": head_dim, "group_size": group_size}
    case = make_paged_case(lengths, dtype=dtype, **sizes)
    case.k_pool[..., ::2] += 2 * torch.randn(head_dim // 2, generator=torch.Generator().manual_seed(1)).to(case.k_pool)
    for b in (2, 4) if DEVICE == "cuda" else (2,):
        case.k_pool[case.slots(b)[-1]] += (
            case.q[b].view(case.num_kv_heads, group_size, -1).mean(1) * group_size**0.5 / 2
        )
    check(Fused(case, bits=2, symmetric=True, delta=delta), impl)


@over_impls
@pytest.mark.parametrize(
    ("pages", "open_tokens"), [(pages, tokens) for pages in (127, 128, 129) for tokens in (-1, 0, 1)] + [(1032, 0)]
)
def test_borders_of_pages_and_splits(impl, pages, open_tokens):
    """A row of one program, longer than what it scans at once; and rows that programs share."""
    lengths = [pages * 16 + open_tokens] + [33, 250] * (pages < 200)
    case = make_paged_case(lengths, num_kv_heads=1, group_size=1, block_size=16, dtype=DTYPES[0])
    check(Fused(case, tail=True, delta=1.0, num_programs=1 if pages % 2 else 3), impl)


@over_impls
@pytest.mark.parametrize("delta", [1e6, math.inf, math.nan])
@pytest.mark.parametrize("tail", [False, True])
def test_a_large_delta_is_dense_attention(impl, delta, tail):
    case = make_paged_case([200, 1, 0, 96], group_size=4, page_size=32, block_size=16, dtype=DTYPES[0])
    fused = Fused(case, delta=delta, tail=tail).run(impl)
    everything = [[list(range(case.blocks(b)))] * 2 for b in range(case.batch)]
    assert fused.counts.tolist() == [[case.blocks(b)] * 2 for b in range(case.batch)]
    out, lse = expected_attention(fused, everything)
    torch.testing.assert_close(fused.out.double(), out, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(fused.lse.double(), lse, atol=1e-2, rtol=1e-3)


@over_impls
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("num_programs", [2, 6, 13])
def test_parts_that_keep_nothing_are_harmless(impl, tail, num_programs):
    case = make_paged_case([500, 37], page_size=16, block_size=8, dtype=DTYPES[0])
    for b in range(2):
        # The newest key points where the queries do: nothing else comes near.
        newest = case.slots(b)[-1]
        case.k_pool[newest] = case.q[b].view(2, 2, -1).sum(1) * 4
    fused = Fused(case, delta=1e-3, tail=tail, num_programs=num_programs, window=1)
    kept = fused.kept(impl)
    # A sink block, and what is left of the open page; 37 tokens end in one of their own.
    assert kept == [[[0, 62]] * 2, [[0, 4]] * 2]
    fused.kept_total.zero_()
    check(fused, impl)


@over_impls
def test_one_token(impl):
    case = make_paged_case([1], dtype=DTYPES[0])
    fused = Fused(case, tail=True).run(impl)
    torch.testing.assert_close(fused.out[0].view(2, 2, -1), case.values(0)[0][:, None].expand(2, 2, -1))
    assert fused.counts.tolist() == [[1, 1]]


@over_impls
def test_short_rows_keep_all_and_read_no_summaries(impl):
    case = make_paged_case([100, 160], page_size=16, block_size=8, dtype=DTYPES[0])
    fused = Fused(case, delta=0.5, min_context=150, tail=True)
    for tensor in (fused.codes, fused.low_step, fused.means):
        tensor[case.page_table[0, :6].long()] = poisoned(*tensor[:6].shape, dtype=tensor.dtype)
    check(fused, impl)
    assert fused.counts[0].tolist() == [13, 13]


@over_impls
def test_deltas_by_head(impl):
    case = make_paged_case([150, 150], dtype=DTYPES[0])
    fused = Fused(case, tail=True)
    fused.delta.copy_(torch.tensor([[0.2, math.inf], [1.0, 3.0]]))
    check(fused, impl)


@over_impls
def test_a_maximum_that_is_no_number_keeps_all(impl):
    case = make_paged_case([200], dtype=DTYPES[0])
    fused = Fused(case, delta=0.1)
    case.k_pool[case.slots(0)[-1], 1] = float("nan")
    fused.run(impl)
    assert fused.counts[0, 0] < 25
    assert fused.counts[0, 1] == 25
    assert fused.out[0, :2].isfinite().all()


@over_impls
def test_a_page_whose_summary_is_no_number_is_kept(impl):
    case = make_paged_case([200], dtype=DTYPES[0])
    case.k_pool[case.slots(0)[-1]] = case.q[0].view(2, 2, -1).sum(1) * 4
    fused = Fused(case, delta=1e-3)
    before = fused.run(impl).counts.tolist()
    fused.low_step[case.page_table[0, 4].long(), 0] = float("nan")
    fused.run(impl)
    assert fused.counts.tolist() == [[before[0][0] + 2, before[0][1]]]
    assert fused.out.isfinite().all()


@triton.jit
def _pages_of_units(out, row_pages, SIZE: tl.constexpr):
    units = tl.arange(0, SIZE)
    tl.store(out + units, row_page(units, row_pages), mask=units < row_pages)


def test_units_are_the_pages_of_the_row_each_once_and_far_apart():
    for pages in (1, 2, 31, 32, 33, 63, 64, 65, 1000, 1023):
        out = torch.full((1024,), -1, dtype=torch.int32, device=DEVICE)
        _pages_of_units[(1,)](out, pages, SIZE=1024)
        order = out[:pages].tolist()
        assert sorted(order) == list(range(pages))
        if pages > 900:
            assert all(abs(a - b) >= pages // 32 for a, b in itertools.pairwise(order) if a and b)


@over_impls
@over_shapes
@pytest.mark.parametrize("num_programs", [2, 5, 16])
def test_counts_of_another_step_do_no_harm(impl, page_size, block_size, head_dim, group_size, num_programs):
    lengths = [0, page_size, 5 * page_size + block_size // 2, 9, 0]
    sizes = {"page_size": page_size, "block_size": block_size, "head_dim": head_dim, "group_size": group_size}
    case = make_paged_case(lengths, dtype=DTYPES[-1], **sizes)
    fused = Fused(case, tail=True, num_programs=num_programs, last_kept=True, min_context=page_size // 2)
    numbers = torch.Generator().manual_seed(num_programs)
    fused.last_kept.copy_(torch.randint(-5, 30, fused.last_kept.shape, generator=numbers))
    check(fused, impl)


@over_impls
@over_shapes
def test_rows_that_begin_at_the_borders_of_shares(impl, page_size, block_size, head_dim, group_size, monkeypatch):
    monkeypatch.setattr("sparse_kernels._fused_shares.ALIGNED_PROGRAMS", 2)
    lengths = [0, page_size, 5 * page_size + block_size // 2, 9]
    sizes = {"page_size": page_size, "block_size": block_size, "head_dim": head_dim, "group_size": group_size}
    case = make_paged_case(lengths, dtype=DTYPES[-1], **sizes)
    num_programs = 3 * len(lengths) * case.num_kv_heads + 1
    assert aligned(len(lengths) * case.num_kv_heads, num_programs)
    fused = Fused(case, tail=page_size > 16, num_programs=num_programs, last_kept=True, min_context=page_size // 2)
    numbers = torch.Generator().manual_seed(head_dim)
    fused.last_kept.copy_(torch.randint(-5, 30, fused.last_kept.shape, generator=numbers))
    check(fused, impl)


@over_impls
def test_counts_are_kept_for_the_next_call_whoever_comes(impl):
    """Batches of other lengths and sizes after one another, over the same counts."""
    last_kept = poisoned(5, 2, dtype=torch.int32)
    for seed, lengths in enumerate([[300, 40], [17, 0, 300, 16], [500], [40, 300, 300, 0, 1]]):
        case = make_paged_case(lengths, dtype=DTYPES[0], seed=seed)
        case.k_pool[:, 1] *= 3
        fused = Fused(case, tail=seed % 2 == 0, num_programs=9, delta=1.0, last_kept=True)
        fused.last_kept = last_kept
        before = last_kept.clone()
        check(fused, impl)
        assert torch.equal(last_kept[: case.batch], fused.counts)
        assert torch.equal(last_kept[case.batch :], before[case.batch :])
        equal = Fused(case, tail=seed % 2 == 0, num_programs=9, delta=1.0).run(impl)
        torch.testing.assert_close(fused.out, equal.out, atol=2e-3, rtol=1e-2)
        assert torch.equal(fused.counts, equal.counts)


@over_impls
def test_counts_of_more_costs_than_fit_are_left_alone(impl, monkeypatch):
    assert fits(8 * 64, 32768)
    assert not fits(8 * 256, 32768)
    monkeypatch.setattr("sparse_kernels._fused_shares.KEPT_WEIGHT", 2**30)
    fused = Fused(make_paged_case([100, 30], dtype=DTYPES[0]), last_kept=True)
    check(fused, impl)
    if impl == "triton":
        assert torch.equal(fused.last_kept, poisoned(3, 2, dtype=torch.int32))


@triton.jit
def _segments(found, seq_lens, last_kept, batch, kv_heads, MOST: tl.constexpr, ROWS: tl.constexpr):
    """Per program up to `MOST` times request, KV head, first page and end."""
    program = tl.program_id(0)
    cost, end = program_range(program, seq_lens, last_kept, batch, kv_heads, 16, 8, 8, 32, ROWS)
    place = found + program * (MOST * 4)
    while cost < end:
        b, h, before, weight = find_row(cost, seq_lens, last_kept, batch, kv_heads, 16, 8, 8, 32, ROWS)
        pages = tl.cdiv(tl.load(seq_lens + b), 16)
        first = tl.cdiv(tl.maximum(cost - before, 0), weight)
        last = tl.minimum(pages, tl.cdiv(end - before, weight))
        tl.store(place, b)
        tl.store(place + 1, h)
        tl.store(place + 2, first)
        tl.store(place + 3, last)
        place += 4
        cost = before + last * weight


@triton.jit
def _aligned_segments(found, seq_lens, last_kept, batch, kv_heads, ROWS: tl.constexpr):
    """Per program request, KV head, first page and end, if it has a page."""
    program = tl.program_id(0)
    b, h, first, end = aligned_range(program, seq_lens, last_kept, batch, kv_heads, 16, 8, 8, 32, ROWS)
    if first < end:
        place = found + program * 4
        tl.store(place, b)
        tl.store(place + 1, h)
        tl.store(place + 2, first)
        tl.store(place + 3, end)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("is_aligned", [False, True])
def test_each_page_has_one_program_and_rows_have_programs_without_gaps(seed, is_aligned):
    numbers = torch.Generator().manual_seed(seed)
    batch, kv_heads, programs = [(1, 2, 7), (3, 3, 8), (5, 2, 40), (2, 1, 1), (4, 4, 16), (9, 1, 300)][seed % 6]
    longest = 16 * (3 if seed % 2 else 60)
    lengths = torch.randint(0, longest, (batch,), generator=numbers) * (torch.rand(batch, generator=numbers) > 0.3)
    kept = torch.randint(-3, 2 * (longest // 8), (batch, kv_heads), generator=numbers)
    found = torch.full((programs, 64, 4), -1, dtype=torch.int32, device=DEVICE)
    arguments = (lengths.int().to(DEVICE), kept.int().to(DEVICE), batch, kv_heads)
    if is_aligned:
        programs = batch * kv_heads + 1 + 3 * seed
        found = torch.full((programs, 1, 4), -1, dtype=torch.int32, device=DEVICE)
        _aligned_segments[(programs,)](found, *arguments, ROWS=4)
    else:
        _segments[(programs,)](found, *arguments, MOST=64, ROWS=4)
    rows = {}
    for program, segments in enumerate(found.tolist()):
        for b, h, first, last in segments:
            if b >= 0:
                assert first < last
                rows.setdefault((b, h), []).append((program, first, last))
    assert set(rows) == {(b, h) for b in range(batch) if lengths[b] for h in range(kv_heads)}
    for (b, _), parts in rows.items():
        assert parts[0][1] == 0
        assert parts[-1][2] == -(-int(lengths[b]) // 16)
        for one, other in itertools.pairwise(parts):
            assert other[:2] == (one[0] + 1, one[2])


def test_programs_get_equal_costs():
    """A head that kept everything has five times as many programs as one that kept next to nothing."""
    programs = 60
    found = torch.full((programs, 8, 4), -1, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([16000], dtype=torch.int32, device=DEVICE)
    last_kept = torch.tensor([[2000, 1]], dtype=torch.int32, device=DEVICE)
    _segments[(programs,)](found, lengths, last_kept, 1, 2, MOST=8, ROWS=64)
    by_head = [int((found[:, :, 1] == h).any(1).sum()) for h in range(2)]
    assert by_head == [50, 10]
    found = torch.full((programs, 4), -1, dtype=torch.int32, device=DEVICE)
    _aligned_segments[(programs,)](found, lengths, last_kept, 1, 2, ROWS=64)
    by_head = [int((found[:, 1] == h).sum()) for h in range(2)]
    assert sum(by_head) in (59, 60)
    assert by_head[0] == pytest.approx(50, abs=1)


@pytest.mark.parametrize(
    ("shape", "page_size", "multiprocessors", "batches"),
    [
        ((8, 4, 128), 64, 132, [1, 2, 4]),
        ((8, 8, 128), 64, 132, [1, 2]),
        ((8, 4, 128), 128, 132, [1, 2]),
        ((32, 1, 96), 64, 132, [1]),
        ((8, 4, 128), 64, 108, [1, 2]),
    ],
    ids=["Llama-3.1-8B", "groups of 8", "pages of 128", "32 KV heads", "A100"],
)
def test_rows_are_aligned_where_32_programs_are_there_for_each(shape, page_size, multiprocessors, batches, monkeypatch):
    """Batches of 1, 2 and 4, as docs/performance.md names them; by the grid that a workspace has."""
    monkeypatch.setattr(
        "sparse_kernels._fused_plan.planned_programs",
        lambda _, per_multiprocessor, kv_heads: multiprocessors * per_multiprocessor // kv_heads * kv_heads,
    )
    sizes = {"page_size": page_size, "block_size": 16, "device": "meta"}
    arguments = (*shape, torch.bfloat16)
    programs = FusedWorkspace.create(*arguments, **sizes).num_programs
    assert [batch for batch in (1, 2, 4) if fused_rows_are_aligned(batch, *arguments, **sizes)] == batches
    assert [batch for batch in (1, 2, 4) if aligned(batch * shape[0], programs)] == batches


def test_refuses_what_does_not_fit():
    fused = Fused(make_paged_case([40], dtype=torch.float16))
    fused.workspace = FusedWorkspace.create(2, 4, 64, torch.float16, page_size=16, block_size=8, device=DEVICE)
    with pytest.raises(ValueError, match=r"workspace\.partial_out has shape"):
        fused.run("torch")
    fused = Fused(make_paged_case([40], dtype=torch.float16))
    fused.bits = 3
    with pytest.raises(ValueError, match="codes has shape"):
        fused.run("torch")
    fused = Fused(make_paged_case([40], dtype=torch.float16))
    fused.delta = fused.delta.double()
    with pytest.raises(ValueError, match="delta has dtype"):
        fused.run("torch")
    fused = Fused(make_paged_case([40], dtype=torch.float16), last_kept=True)
    fused.last_kept = fused.last_kept[:0]
    with pytest.raises(ValueError, match="last_kept has shape"):
        fused.run("torch")
