"""Sparse attention with a tail against a brute force in float64, over ragged batches in which all else is poisoned."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch
from factories import DEVICE, DTYPES, PagedCase, make_paged_case, poisoned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sparse_kernels import AttentionTail, AttentionWorkspace, block_statistics, coverage_rule, sparse_attention
from sparse_kernels import _attention_plan as plan

NATIVE = DEVICE == "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass
class TailCase:
    """A batch, the lists of its rows, and the tail that stands for the rest."""

    paged: PagedCase
    lists: torch.Tensor
    counts: torch.Tensor
    tail: AttentionTail

    def leaves_out(self, b: int, h: int) -> bool:
        return int(self.counts[b, h]) < self.paged.blocks(b)

    def run(
        self, impl: str, num_programs: int | None = 3, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        p = self.paged
        workspace = AttentionWorkspace.create(num_programs, p.group_size, p.head_dim, DEVICE)
        for tensor in (workspace.partial_out, workspace.partial_max, workspace.partial_sum):
            tensor.fill_(float("nan"))
        out = poisoned(*p.q.shape, dtype=p.q.dtype) if out is None else out
        sparse_attention(
            p.q,
            p.k_pool,
            p.v_pool,
            p.page_table,
            p.seq_lens,
            self.lists,
            self.counts,
            scale=p.scale,
            page_size=p.page_size,
            block_size=p.block_size,
            out=out,
            workspace=workspace,
            tail=self.tail,
            lse=lse,
            impl=impl,
        )
        return out

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The definition, block by block: output and log-sum-exp, float64."""
        p, tail = self.paged, self.tail
        cell = p.page_size // tail.value_means.shape[2]
        out = torch.zeros(p.q.shape, dtype=torch.float64, device=DEVICE)
        lse = torch.full(p.q.shape[:2], float("-inf"), dtype=torch.float64, device=DEVICE)
        for b in range(p.batch):
            keys, all_values = p.keys(b).double(), p.values(b).double()
            for head in range(p.q.shape[1] if p.lengths[b] else 0):
                h, g = divmod(head, p.group_size)
                scores, values = [], []
                for j in self.lists[b, h, : int(self.counts[b, h])].tolist():
                    block = slice(j * p.block_size, min((j + 1) * p.block_size, p.lengths[b]))
                    scores.append(keys[block, h] @ p.q[b, head].double() * p.scale)
                    values.append(all_values[block, h])
                left_out = [j for j in range(p.blocks(b)) if not tail.kept_mask[b, h, j]]
                for j in left_out if self.leaves_out(b, h) else []:
                    token = j * p.block_size
                    page = int(p.page_table[b, token // p.page_size])
                    scores.append(tail.log_mass[b, h, g, j].double()[None])
                    values.append(tail.value_means[page, h, token % p.page_size // cell].double()[None])
                if not scores or torch.cat(scores).max() == float("-inf"):
                    continue
                joined = torch.cat(scores)
                out[b, head] = joined.softmax(0) @ torch.cat(values)
                lse[b, head] = joined.logsumexp(0)
        return out, lse


def make_tail_case(
    lengths: list[int],
    *,
    kept: float = 0.3,
    cells: int = 1,
    keeps_all: tuple[int, ...] = (),
    spread: float = 2.0,
    infinite: float = 0.1,
    seed: int = 0,
    **shape,
) -> TailCase:
    """A share `kept` of each row's blocks is listed, those of the open page always; rows in `keeps_all` keep all.

    Log masses are normal with standard deviation `spread`; a share `infinite` of them is -inf.
    """
    paged = make_paged_case(lengths, seed=seed, **shape)
    rng = torch.Generator().manual_seed(seed + 1)
    rows = (paged.batch, paged.num_kv_heads)
    log_mass = torch.full((*rows, paged.group_size, paged.capacity), float("nan"))
    mask = torch.full((*rows, paged.capacity), 0xA5, dtype=torch.uint8)
    counts = torch.full(rows, 10**6, dtype=torch.int32)
    for b, length in enumerate(lengths):
        n = paged.blocks(b)
        closed = length // paged.page_size * (paged.page_size // paged.block_size)
        for h in range(rows[1] if length else 0):
            chosen = torch.rand(n, generator=rng) < kept
            chosen[closed:] = True
            if (b * rows[1] + h) in keeps_all:
                chosen[:] = True
            if not chosen.all():
                masses = torch.randn(paged.group_size, closed, generator=rng) * spread
                masses[torch.rand(masses.shape, generator=rng) < infinite] = float("-inf")
                log_mass[b, h, :, :closed] = masses
                mask[b, h, :n] = chosen.to(torch.uint8)
            counts[b, h] = int(chosen.sum())
    lists = torch.full((*rows, paged.capacity), poisoned(1, dtype=torch.int32, device="cpu").item(), dtype=torch.int32)
    for b, h in itertools.product(range(rows[0]), range(rows[1])):
        n = paged.blocks(b)
        left_out = int(counts[b, h]) < n
        chosen_blocks = mask[b, h, :n].nonzero().flatten() if left_out else torch.arange(n)
        lists[b, h, : len(chosen_blocks)] = chosen_blocks.to(torch.int32)
    shape_of_means = (paged.num_pages, paged.num_kv_heads, cells, paged.head_dim)
    means = poisoned(*shape_of_means, dtype=paged.q.dtype)
    pages = paged.closed_pages().long()
    means[pages] = torch.randn(len(pages), *shape_of_means[1:], generator=rng).to(paged.q.dtype).to(DEVICE)
    tail = AttentionTail(log_mass.to(DEVICE), mask.to(DEVICE), means)
    return TailCase(paged, lists.to(DEVICE), counts.to(DEVICE), tail)


def check(case: TailCase, num_programs: int | None = 3) -> None:
    expected, expected_lse = case.expected()
    for impl in ("torch", "triton"):
        lse = poisoned(*case.paged.q.shape[:2])
        out = case.run(impl, num_programs, lse=lse)
        tolerance = TOLERANCE[out.dtype]
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4, msg=lambda m: f"{impl}: {m}")  # noqa: B023
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{impl}: {m}")  # noqa: B023
        torch.testing.assert_close(case.run(impl, num_programs), out, rtol=0, atol=0)


# lengths, KV heads, G, D, page, block, cells a page, programs
SHAPES = [
    ([70, 0, 1000], 2, 1, 64, 16, 8, 1, 3),
    ([260], 1, 4, 96, 32, 16, 1, 2),
    ([0, 400, 63, 64], 2, 7, 128, 64, 16, 1, 7),
    ([1290], 1, 8, 128, 128, 64, 2, 5),
    ([513, 128], 1, 16, 256, 128, 8, 2, 1),
    ([4000], 1, 2, 64, 64, 64, 1, 4),
    ([3000], 1, 3, 64, 64, 8, 1, 64),
    ([700], 1, 5, 64, 128, 32, 4, 2),
]
if NATIVE:
    SHAPES += [
        ([5000, 17, 0, 30000], 8, 4, 128, 64, 16, 1, None),
        ([3000] * 9, 4, 7, 128, 32, 8, 1, None),
        ([20049, 4097], 8, 16, 256, 128, 64, 2, None),
        ([8191], 3, 3, 96, 16, 16, 1, 1000),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "heads", "group", "dim", "page", "block", "cells", "programs"), SHAPES)
def test_matches_brute_force(lengths, heads, group, dim, page, block, cells, programs, dtype):
    case = make_tail_case(
        lengths,
        num_kv_heads=heads,
        group_size=group,
        head_dim=dim,
        page_size=page,
        block_size=block,
        cells=cells,
        dtype=dtype,
    )
    check(case, programs)


def test_rows_that_keep_all_have_no_tail():
    check(make_tail_case([300, 0, 300], num_kv_heads=3, page_size=32, keeps_all=(0, 2, 7)))
    case = make_tail_case([300, 40, 5], num_kv_heads=2, page_size=32, kept=1.0)
    assert not any(case.leaves_out(b, h) for b in range(3) for h in range(2))
    check(case)


def test_blocks_without_mass_add_nothing():
    case = make_tail_case([600, 90], page_size=32, infinite=1.0)
    check(case, 1)
    check(case, 5)
    for impl in ("torch", "triton"):
        with_tail = case.run(impl)
        dropped = dataclasses.replace(case, tail=None).run(impl)
        torch.testing.assert_close(with_tail, dropped, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 30.0, 1e4])
def test_equal_and_very_different_masses(spread):
    check(make_tail_case([2000, 130], page_size=32, spread=spread, infinite=0.0), 5)


def test_nothing_listed_leaves_the_tail_alone():
    case = make_tail_case([2048], page_size=32, kept=0.0, infinite=0.0)
    assert not case.counts.any()
    check(case, 1)
    check(case, 4)


def test_more_rows_than_one_load_takes(monkeypatch):
    monkeypatch.setattr(plan, "PLAN_ROWS", 16)
    check(make_tail_case([0, 100, 9, 700, 0, 33] * 3, num_kv_heads=3, group_size=1, page_size=16), 4)


def test_strided_outputs_and_longer_buffers():
    case = make_tail_case([500, 0, 77], page_size=32)
    heads, dim = case.paged.q.shape[1:]
    wide = poisoned(3, heads, 2 * dim)
    out = wide[:, :, :dim]
    longer = poisoned(5, *case.counts.shape[1:], dtype=torch.int32)
    longer[:3] = case.counts
    case.counts = longer
    case.run("triton", out=out)
    torch.testing.assert_close(out.double(), case.expected()[0], rtol=2e-5, atol=2e-5)
    assert wide[:, :, dim:].isnan().all()


@settings(max_examples=60 if NATIVE else 10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.one_of(st.just(0), st.integers(1, 600)), min_size=1, max_size=4),
    sizes=st.sampled_from([(16, 8, 1), (64, 16, 1), (128, 32, 2)]),
    group=st.integers(1, 3),
    programs=st.integers(1, 20),
    kept=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    infinite=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_any_batch(lengths, sizes, group, programs, kept, infinite, seed):
    page, block, cells = sizes
    case = make_tail_case(
        lengths,
        page_size=page,
        block_size=block,
        cells=cells,
        group_size=group,
        kept=kept,
        infinite=infinite,
        seed=seed,
    )
    check(case, programs)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_exact_masses_and_constant_values_give_dense_attention(impl):
    """From the rule's lists on: where all tokens of a cell have one value, exact masses make the tail exact."""
    case = make_paged_case([1000, 0, 300, 20], page_size=32, block_size=8, group_size=2)
    scores = torch.full((4, 2, 2, case.capacity), float("nan"), device=DEVICE)
    dense = torch.zeros(case.q.shape, dtype=torch.float64, device=DEVICE)
    for page in range(case.num_pages):
        tokens = slice(page * 32, page * 32 + 32)
        case.v_pool[tokens] = torch.where(case.v_pool[tokens].isnan(), case.v_pool[tokens], case.v_pool[page * 32])
    for b, length in enumerate(case.lengths):
        for head in range(4 if length else 0):
            h = head // 2
            row = case.keys(b)[:, h].double() @ case.q[b, head].double() * case.scale
            dense[b, head] = row.softmax(0) @ case.values(b)[:, h].double()
            for j in range(case.blocks(b)):
                scores[b, h, head % 2, j] = row[j * 8 : j * 8 + 8].logsumexp(0)
    lists = poisoned(4, 2, case.capacity, dtype=torch.int32)
    counts = poisoned(4, 2, dtype=torch.int32)
    kept = poisoned(4, 2, case.capacity, dtype=torch.uint8)
    sizes = {"page_size": 32, "block_size": 8}
    coverage_rule(
        scores,
        case.seq_lens,
        gamma=torch.full((4,), 0.7, device=DEVICE),
        group="average",
        **sizes,
        sink_tokens=8,
        window_tokens=8,
        min_context=0,
        block_lists=lists,
        block_counts=counts,
        scratch=poisoned(4, 2, case.capacity),
        kept_mask=kept,
        impl=impl,
    )
    assert (counts[0] < case.blocks(0)).all()
    means = poisoned(case.num_pages, 2, 1, 64)
    block_statistics(
        case.v_pool,
        case.closed_pages(),
        kind="mean",
        page_size=32,
        block_size=32,
        out=means[:, :, :, None],
        impl=impl,
    )

    def attend(tail: AttentionTail | None) -> torch.Tensor:
        out = poisoned(*case.q.shape)
        sparse_attention(
            case.q,
            case.k_pool,
            case.v_pool,
            case.page_table,
            case.seq_lens,
            lists,
            counts,
            scale=case.scale,
            **sizes,
            out=out,
            workspace=AttentionWorkspace.create(3, 2, 64, DEVICE),
            tail=tail,
            impl=impl,
        )
        return out

    assert (attend(None)[0].double() - dense[0]).abs().max() > 1e-2
    torch.testing.assert_close(attend(AttentionTail(scores, kept, means)).double(), dense, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_replays_follow_the_counts():
    """A captured call: what rows leave out is read on the device."""
    case = make_tail_case([3000, 5000], page_size=64, block_size=16, num_kv_heads=4)
    lists, counts = case.lists.clone(), case.counts.clone()
    for b in range(2):
        case.counts[b] = case.paged.blocks(b)
        case.lists[b, :, : case.paged.blocks(b)] = torch.arange(case.paged.blocks(b), dtype=torch.int32, device=DEVICE)
    everything = case.expected()[0]
    out = poisoned(*case.paged.q.shape)
    case.run("auto", None, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run("auto", None, out=out)
    graph.replay()
    torch.testing.assert_close(out.double(), everything, rtol=2e-5, atol=2e-5)
    case.lists.copy_(lists)
    case.counts.copy_(counts)
    graph.replay()
    torch.testing.assert_close(out.double(), case.expected()[0], rtol=2e-5, atol=2e-5)


def test_errors_name_the_argument():
    case = make_tail_case([100, 40], page_size=32, block_size=16)
    tail = case.tail
    for change, message in [
        ({"log_mass": tail.log_mass.half()}, "tail.log_mass has dtype"),
        ({"log_mass": tail.log_mass[:, :1]}, "tail.log_mass has shape"),
        ({"kept_mask": tail.kept_mask.int()}, "tail.kept_mask has dtype"),
        ({"kept_mask": tail.kept_mask[:, :, :-1]}, "tail.kept_mask has shape"),
        ({"value_means": tail.value_means.half()}, "tail.value_means has dtype"),
        ({"value_means": tail.value_means[:, :1]}, "tail.value_means has shape"),
        ({"value_means": tail.value_means.expand(-1, -1, 3, -1).contiguous()}, "cells a page in tail.value_means is 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(case, tail=dataclasses.replace(tail, **change)).run("triton")
    case.lists = case.counts = None
    with pytest.raises(ValueError, match="tail is given without block_lists"):
        case.run("triton")
