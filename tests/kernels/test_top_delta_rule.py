import math
import sys

import pytest
import torch
from factories import DEVICE, poisoned
from sparse_kernels import SelectionTap, TapPoint, top_delta_rule

over_impls = pytest.mark.parametrize("impl", ["torch", "triton"])
PAGE, BLOCK, SINK, WINDOW = 32, 8, 4, 20
LENGTHS = [1, 31, 32, 0, 33, 300, 2070 * 8 + 3]


def inputs(lengths=LENGTHS, group_size=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    capacity = -(-max(lengths) // PAGE) * (PAGE // BLOCK)
    maxima = torch.randn(len(lengths), 2, group_size, capacity, generator=rng) * 3
    pseudo = torch.randn(len(lengths), 2, group_size, generator=rng) + 6
    for b, length in enumerate(lengths):
        maxima[b, :, :, -(-length // BLOCK) :] = float("nan")
    seq_lens = torch.tensor([*lengths, 2**30], dtype=torch.int32)
    return maxima.to(DEVICE), pseudo.to(DEVICE), seq_lens.to(DEVICE)


def expected_lists(maxima, pseudo, lengths, delta, min_context=0):
    """`[B][Hkv]` lists, block by block from the definition."""
    lists = []
    for b, length in enumerate(lengths):
        rows = []
        for h in range(maxima.shape[1]):
            kept = []
            for j in range(-(-length // BLOCK)):
                tokens = range(j * BLOCK, min((j + 1) * BLOCK, length))
                forced = any(t < SINK or t >= length - WINDOW or t >= length // PAGE * PAGE for t in tokens)
                near = any(
                    not maxima[b, h, g, j] < pseudo[b, h, g] - delta or not math.isfinite(pseudo[b, h, g] - delta)
                    for g in range(maxima.shape[2])
                )
                if forced or near or length < min_context:
                    kept.append(j)
            rows.append(kept)
        lists.append(rows)
    return lists


def select(maxima, pseudo, seq_lens, delta, impl, min_context=0, **kwargs):
    batch, heads, _, capacity = maxima.shape
    lists = poisoned(batch, heads, capacity, dtype=torch.int32)
    counts = poisoned(batch, heads, dtype=torch.int32)
    top_delta_rule(
        maxima,
        pseudo,
        seq_lens,
        delta=delta,
        page_size=PAGE,
        block_size=BLOCK,
        sink_tokens=SINK,
        window_tokens=WINDOW,
        min_context=min_context,
        block_lists=lists,
        block_counts=counts,
        impl=impl,
        **kwargs,
    )
    return [[lists[b, h, : counts[b, h]].tolist() for h in range(heads)] for b in range(batch)]


@over_impls
@pytest.mark.parametrize(("delta", "chunk"), [(0.5, 8192), (4.0, 1024), (100.0, 2048)])
def test_keeps_what_is_near_the_maximum(impl, delta, chunk, monkeypatch):
    monkeypatch.setattr(sys.modules["sparse_kernels.top_delta_rule"], "MAX_CHUNK", chunk)
    maxima, pseudo, seq_lens = inputs()
    kept_total = torch.full((2,), 7, dtype=torch.int64, device=DEVICE)
    mask = poisoned(*maxima.shape[:2], maxima.shape[3], dtype=torch.uint8)
    deltas = torch.full((len(LENGTHS),), delta, device=DEVICE)
    lists = select(maxima, pseudo, seq_lens, deltas, impl, kept_total=kept_total, kept_mask=mask)
    expected = expected_lists(maxima.cpu(), pseudo.cpu(), LENGTHS, delta)
    assert lists == expected
    for h in range(2):
        assert kept_total[h] == 7 + sum(len(rows[h]) for rows in expected)
        for b, length in enumerate(LENGTHS):
            row = mask[b, h, : -(-length // BLOCK)]
            assert row.nonzero().flatten().tolist() == expected[b][h]
            assert (row <= 1).all()


@over_impls
def test_deltas_by_request_and_head(impl):
    maxima, pseudo, seq_lens = inputs([300, 300])
    deltas = torch.tensor([[0.1, 3.0], [float("inf"), 5.0]], device=DEVICE)
    lists = select(maxima, pseudo, seq_lens, deltas, impl)
    for b in range(2):
        for h in range(2):
            expected = expected_lists(maxima.cpu(), pseudo.cpu(), [300, 300], deltas[b, h].item())
            assert lists[b][h] == expected[b][h]
    assert lists[1][0] == list(range(38))


@over_impls
@pytest.mark.parametrize("delta", [math.inf, math.nan])
def test_keeps_all_without_a_delta(impl, delta):
    maxima, pseudo, seq_lens = inputs([300])
    assert select(maxima, pseudo, seq_lens, torch.full((1,), delta, device=DEVICE), impl)[0][1] == list(range(38))


@over_impls
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_kept(impl, value):
    maxima, pseudo, seq_lens = inputs([300])
    pseudo += 100
    deltas = torch.ones(1, device=DEVICE)
    assert 20 not in select(maxima, pseudo, seq_lens, deltas, impl)[0][0]
    if value != -math.inf:
        maxima[0, 0, 1, 20] = value
        assert 20 in select(maxima, pseudo, seq_lens, deltas, impl)[0][0]
        assert 20 not in select(maxima, pseudo, seq_lens, deltas, impl)[0][1]
    pseudo[0, 1, 2] = value
    assert select(maxima, pseudo, seq_lens, deltas, impl)[0][1] == list(range(38))


@over_impls
def test_short_rows_keep_all_and_read_no_maxima(impl):
    maxima, pseudo, seq_lens = inputs([300, 200])
    pseudo[1] = float("nan")
    maxima[1] = float("nan")
    pseudo[0] += 100
    lists = select(maxima, pseudo, seq_lens, torch.ones(2, device=DEVICE), impl, min_context=300)
    assert lists[1][0] == list(range(25))
    assert len(lists[0][0]) < 10


@over_impls
def test_tap_gets_the_row_it_names(impl):
    maxima, pseudo, seq_lens = inputs([300, 200, 100])
    capacity = maxima.shape[3]
    tap = SelectionTap.create(
        kv_heads=2, group_size=3, head_dim=64, capacity=capacity, dtype=torch.float16, device=DEVICE
    )
    q = torch.randn(3, 6, 64).to(torch.float16).to(DEVICE)
    tap.arm(5, 2 + 1)
    lists = select(maxima, pseudo, seq_lens, torch.full((3,), 4.0, device=DEVICE), impl, tap=TapPoint(tap, 5, q, 2))
    assert tap.seq_len.item() == 200
    assert torch.equal(tap.q, q[1])
    assert [tap.block_lists[h, : tap.block_counts[h]].tolist() for h in range(2)] == lists[1]


def test_refuses_a_delta_of_another_shape():
    maxima, pseudo, seq_lens = inputs([300, 200])
    with pytest.raises(ValueError, match="delta has shape"):
        select(maxima, pseudo, seq_lens, torch.ones(1, device=DEVICE), "torch")
