"""What the kernel benchmarks feed to their peers, checked on the CPU by attention over the same views."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sparse_kernels import sparse_attention_reference

from benchmarks import peers
from benchmarks.errors import BenchmarkError
from benchmarks.kernels import bench_sparse_attention as attention_benchmark
from benchmarks.kernels import block_mass, pages, rules
from benchmarks.kernels.bench_sparse_attention import bytes_to_move, make_lists, peer_inputs
from benchmarks.kernels.common import Measurement, Suite, result_rows
from benchmarks.peers import flashinfer_paged, flashinfer_variable, sdpa

SUITE = Suite(
    batches=(3,),
    contexts=(700,),
    num_kv_heads=2,
    head_dim=64,
    dtype=torch.float32,
    device="cpu",
)


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.kernels.common.ROTATED_BYTES", 2**20)


def case(kept: str) -> tuple[peers.AttentionInputs, torch.Tensor]:
    """Inputs, and attention over the listed blocks by the reference."""
    batch = SUITE.batch(3, 700)
    lists = make_lists(SUITE, [batch], kept)[0]
    inputs = peer_inputs(SUITE, batch, lists)
    out = torch.empty_like(batch.q)
    sparse_attention_reference(
        batch.q,
        SUITE.k_pool,
        SUITE.v_pool,
        batch.page_table,
        batch.seq_lens,
        *lists,
        scale=SUITE.scale,
        page_size=SUITE.page_size,
        block_size=SUITE.block_size,
        out=out,
    )
    return inputs, out


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.softmax(q @ k.T * scale, -1) @ v


@pytest.mark.parametrize("kept", ["0.2", "0.9", "smollm2-8k"])
def test_flashinfer_pages_name_the_listed_blocks(kept: str) -> None:
    inputs, expected = case(kept)
    starts, pages, last_tokens = flashinfer_paged.page_lists(inputs)
    keys, values = (flashinfer_paged.head_pages(pool, 16)[:, :, 0] for pool in (inputs.k_pool, inputs.v_pool))
    assert len(pages) == starts[-1] == int(inputs.lists[1].sum())
    for row in range(6):
        own = pages[starts[row] : starts[row + 1]].long()
        tokens = len(own) * 16 - 16 + int(last_tokens[row])
        q = inputs.q.view(6, 4, -1)[row]
        out = attend(q, keys[own].flatten(0, 1)[:tokens], values[own].flatten(0, 1)[:tokens], inputs.scale)
        torch.testing.assert_close(out, expected.view(6, 4, -1)[row])


@pytest.mark.parametrize("kept", ["0.2", "0.9"])
def test_flashinfer_masks_name_the_listed_blocks(kept: str) -> None:
    inputs, expected = case(kept)
    mask, sizes = flashinfer_variable.mask_and_sizes(inputs)
    tokens = (mask.shape[-1] - 1) * 16
    keys, values = (copied.flatten(0, 1) for copied in flashinfer_variable.contiguous_kv(inputs, tokens=tokens))
    assert (sizes.sum(1) == tokens).all()
    assert tokens == 704
    for row in range(6):
        read = mask[row, 0].repeat_interleave(sizes[row])
        out = attend(inputs.q.view(6, 4, -1)[row], keys[row][read], values[row][read], inputs.scale)
        torch.testing.assert_close(out, expected.view(6, 4, -1)[row])


def test_sdpa_is_right_for_the_longest_request() -> None:
    inputs, expected = case("1")
    (call,) = sdpa.prepare(inputs)
    torch.testing.assert_close(call.call()[0], expected[0])


def test_shares_of_a_profile_are_kept() -> None:
    batch = Suite(num_kv_heads=64, device="cpu", dtype=torch.float32, batches=(1,), contexts=(8000,)).batch(1, 8000)
    suite = Suite(num_kv_heads=64, device="cpu", dtype=torch.float32)
    counts = suite.random_lists(batch, "lognormal:0.2")[1]
    assert counts.float().mean() / 500 == pytest.approx(0.2, abs=0.02)
    assert counts.float().std() / 500 > 0.1


@pytest.mark.parametrize(("room", "columns"), [(100, 11), (705, 12), (2000, 32)])
def test_rows_have_room_for_more(room: int, columns: int) -> None:
    suite = replace(SUITE, room=room)
    batch, plain = suite.batch(3, 700, 1), SUITE.batch(3, 700, 1)
    assert suite.capacity(700) == columns * 4
    assert batch.page_table.shape == (3, columns)
    assert torch.equal(batch.page_table[:, :11], plain.page_table)
    assert not batch.page_table[:, 11:].any()
    lists, counts = suite.random_lists(batch, "0.5")
    for row, count in zip(lists.flatten(0, 1), counts.flatten(), strict=True):
        assert row[:count].max() < 44


@pytest.mark.parametrize(
    "operation",
    [
        *("coverage_rule", "top_k_rule", "top_delta_rule", "expected_blocks"),
        *("block_mass_thumbnail", "block_score_strided", "page_table", "open_places"),
    ],
)
def test_room_does_not_count_as_read(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    bench = importlib.import_module(f"benchmarks.kernels.bench_{operation}")
    for module in (bench, rules, block_mass):
        monkeypatch.setattr(module, "time_in_turn", lambda calls: 1.0, raising=False)
    small = replace(SUITE, batches=(2,), contexts=(300,))
    plain, roomy = ([row.bytes for row in bench.run(suite)] for suite in (small, replace(small, room=2000)))
    assert plain
    # Which blocks the random values list differs a little with the shape that they are drawn for.
    assert roomy == pytest.approx(plain, rel=0.1)


def test_bytes_are_those_of_the_listed_blocks() -> None:
    inputs, _ = case("0.2")
    blocks = int(inputs.lists[1].sum())
    assert bytes_to_move(SUITE, SUITE.batch(3, 700), inputs.lists) == blocks * (2 * 16 * 64 * 4 + 4)


def test_a_measurement_becomes_a_row() -> None:
    (row,) = result_rows([Measurement("op", "case", 2, 100, 0.5, 2e-3, 4_000_000)], 4e9)
    assert (row.bench, row.case, row.impl) == ("kernel", "op: case", "sparse_kernels")
    assert row.ms == pytest.approx(2)
    assert row.read_share == pytest.approx(0.5)


def test_unknown_peers_are_refused() -> None:
    with pytest.raises(BenchmarkError, match=r"--peers fa9: there is no such peer: use some of fa3"):
        peers.available(["fa9"])


def test_missing_peers_are_left_out_in_a_line_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    missing = SimpleNamespace(why_missing=lambda: "sgl_kernel is not installed")
    there = SimpleNamespace(why_missing=lambda: "")
    monkeypatch.setattr(peers, "module", lambda name: missing if name == "fa3" else there)
    assert peers.available(None) == ["triton", "sdpa", "flashinfer-paged", "flashinfer-variable"]
    assert capsys.readouterr().out == "peer fa3: sgl_kernel is not installed: left out\n"
    with pytest.raises(BenchmarkError, match="--peers fa3: sgl_kernel is not installed: install it"):
        peers.available(["fa3"])


def test_an_absent_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "flashinfer" in peers.import_problem("flashinfer")
    assert peers.import_problem("json") == ""


class FakePaged:
    """FlashInfer's paged decode, as far as we use it, in torch."""

    plans = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert kv_layout == "NHD"
        assert use_tensor_cores

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **more) -> None:
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 1, 64, 16)
        assert {indptr.dtype, indices.dtype, last_page_len.dtype} == {torch.int32}
        self.rows = (indptr.tolist(), indices.long(), last_page_len.tolist(), more["sm_scale"])
        FakePaged.plans += 1

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        indptr, indices, last, scale = self.rows
        for row in range(len(q)):
            own = indices[indptr[row] : indptr[row + 1]]
            tokens = (len(own) - 1) * 16 + last[row]
            k, v = (cache[own, :, 0].flatten(0, 1)[:tokens] for cache in caches)
            out[row] = attend(q[row], k, v, scale)


class FakeVariable:
    """FlashInfer's variable block-sparse attention, as far as we use it, in torch."""

    def __init__(self, workspace: torch.Tensor) -> None:
        pass

    def plan(self, block_mask_map, block_row_sz, block_col_sz, num_qo_heads, num_kv_heads, head_dim, **more) -> None:
        assert block_mask_map.shape == (num_kv_heads, block_row_sz.shape[1], block_col_sz.shape[1])
        assert (num_qo_heads, head_dim, more["q_data_type"]) == (4 * num_kv_heads, 64, torch.float32)
        self.planned = (block_mask_map, block_col_sz, more["sm_scale"])

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask, sizes, scale = self.planned
        groups = q.view(len(mask), -1, q.shape[-1])
        reads = [m[0].repeat_interleave(s) for m, s in zip(mask, sizes, strict=True)]
        rows = [attend(g, k[i][r], v[i][r], scale) for i, (g, r) in enumerate(zip(groups, reads, strict=True))]
        return torch.cat(rows)[:, None]


def test_peers_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The whole run of the attention benchmark with clocks that stand still; FlashInfer is a stand-in."""
    fake = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FakePaged, VariableBlockSparseAttentionWrapper=FakeVariable
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    for peer in (flashinfer_paged, flashinfer_variable):
        monkeypatch.setattr(peer, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr("benchmarks.kernels.common.MAX_SETS", 2)
    monkeypatch.setattr("benchmarks.kernels.common.ROTATED_BYTES", 2**23)

    def timed(calls: list) -> float:
        assert len(calls) == 2
        for call in calls:
            call()
        return 1e-3

    monkeypatch.setattr(attention_benchmark, "TIMERS", dict.fromkeys(("graph", "eager", "host"), timed))
    monkeypatch.setattr(attention_benchmark, "time_in_turn", timed)
    suite = replace(SUITE, kept=("0.3", "1"), peers=("sdpa", "flashinfer-paged", "flashinfer-variable"))
    measured = [(m.impl, m.case, m.bytes is not None) for m in attention_benchmark.run(suite)]
    assert measured == [
        ("sparse_kernels", "lists, kept 0.3", True),
        ("flashinfer-paged", "lists, kept 0.3; kernel", True),
        ("flashinfer-paged", "lists, kept 0.3; plan", False),
        ("flashinfer-paged", "lists, kept 0.3; plan and kernel", True),
        ("flashinfer-variable", "lists, kept 0.3; kernel, contiguous copy", True),
        ("flashinfer-variable", "lists, kept 0.3; plan", False),
        ("flashinfer-variable", "lists, kept 0.3; plan and kernel", True),
        ("sparse_kernels", "all blocks", True),
        ("sdpa", "all blocks; contiguous copy", True),
    ]
    assert capsys.readouterr().out == ""

    # Wrong results are not timed.
    monkeypatch.setattr(FakeVariable, "run", lambda self, q, k, v: torch.zeros_like(q))
    wrong = replace(suite, kept=("0.3",), peers=("flashinfer-variable",))
    assert [m.impl for m in attention_benchmark.run(wrong)] == ["sparse_kernels"]
    assert "peer flashinfer-variable, B=3 context=700 kept=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("slot_lookup", ["all hits, kept 0.3"]),
        ("slot_assign", ["with lookup, 1"]),
        ("slot_attention", ["pool, kept 0.3", "slots, 0% direct, kept 0.3", "slots, 2% direct, kept 0.3"]),
        ("block_gather", ["64 blocks of 8192 B, 8 programs", "64 blocks of 8192 B, 32 programs"]),
        ("block_unpack", ["64 blocks of 2080 B, 8 programs", "64 blocks of 2080 B, 32 programs"]),
        ("slot_claim", ["with assign, no idle slot", "with assign, all in slots"]),
        ("offload_step", ["resident, kept 0.3", "2"]),
        ("block_store", ["decode, 3 tokens", "prefill, 2048 tokens"]),
        ("split_attention", ["lists, kept 0.3, pool", "lists, kept 0.3, split"]),
        ("split_quantise", ["keys, 1 pages", "keys, 8 pages"]),
        ("split_dequantise", ["16 pages"]),
        ("split_store", ["decode, 3 tokens", "prefill, 2048 tokens"]),
    ],
)
def test_operations_of_own_pools_are_checked_and_timed(
    name: str, cases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole run with clocks that stand still."""
    module = importlib.import_module(f"benchmarks.kernels.bench_{name}")

    def timed(calls: list) -> float:
        for call in calls:
            call()
        return 1e-3

    for timing in (module, pages):
        monkeypatch.setattr(timing, "time_in_turn", timed, raising=False)
    if name in ("block_gather", "block_unpack"):
        for constant, value in (("POOL_BYTES", 2**22), ("COUNTS", (8, 64)), ("PROGRAMS", (8, 32))):
            monkeypatch.setattr(module, constant, value)
    measured = list(module.run(replace(SUITE, kept=("0.3",), head_dim=64)))
    assert all(m.bytes for m in measured)
    for case in cases:
        assert any(m.case.startswith(case) for m in measured), [m.case for m in measured]
