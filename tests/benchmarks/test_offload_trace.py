"""Recorded block sets, and simulated caches of them, against the cache that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from random_model import write_random_model
from sparse_kernels import FetchList, SlotMaps, slot_assign, slot_lookup
from sparse_kernels.slot_assign import AGES

from benchmarks.__main__ import main
from benchmarks.offload import recording, simulation
from benchmarks.offload.recording import BlockTrace
from benchmarks.offload.summary import SIZES, slots_for, summarise
from sglang_sparse.calibrate.prompts import Prompt
from sglang_sparse.calibrate.replay import Replay
from sglang_sparse.calibrate.settings import Setting
from sglang_sparse.option_sources import merge
from sglang_sparse.options import SparseDecodeOptions


def random_rows(steps: int, rows: int, blocks: int, seed: int) -> torch.Tensor:
    """Sets that change by a part each step."""
    rng = torch.Generator().manual_seed(seed)
    likely = torch.rand(rows, blocks, generator=rng) ** 3
    made = [torch.rand(rows, blocks, generator=rng) < likely]
    for _ in range(steps - 1):
        redrawn = torch.rand(rows, blocks, generator=rng) < 0.4
        made.append(torch.where(redrawn, torch.rand(rows, blocks, generator=rng) < likely, made[-1]))
    return torch.stack(made)


@pytest.mark.parametrize("slots", [0, 1, 5, 12, 60])
def test_the_simulated_clock_is_the_kernels(slots: int) -> None:
    rows = random_rows(40, 3, 50, seed=slots)
    hits = simulation.clock(rows, torch.full((3,), slots), ages=AGES)
    assert simulation.AGES == AGES
    maps, fetch = SlotMaps.create(3, 52, slots, "cpu"), FetchList.create(3, slots, "cpu")
    totals = torch.zeros(4, dtype=torch.int64)
    epoch = torch.tensor([AGES[0]], dtype=torch.int32)
    # 50 blocks on 25 closed pages, and an open one.
    lengths, table = torch.tensor([52 * 8], dtype=torch.int32), torch.arange(26, dtype=torch.int32)[None]
    order = torch.arange(50)
    for step in range(40):
        lists = torch.where(rows[step], order, 99).sort(-1).values[None].int()
        counts = rows[step].sum(-1)[None].int()
        epoch += 1
        before = int(totals[0])
        sizes = {"lag": 0, "page_size": 16, "block_size": 8}
        slot_lookup(table, lengths, lists, counts, epoch, maps, fetch, **sizes, totals=totals)
        slot_assign(epoch, maps, fetch, lag=0, blocks_per_page=2, totals=totals)
        assert int(totals[0]) - before == int(hits[step].sum())


def lru_by_hand(row: torch.Tensor, slots: int) -> list[int]:
    cached: list[int] = []
    hits = []
    for kept in row:
        blocks = kept.nonzero().flatten().tolist()
        hits.append(len(set(blocks) & set(cached)))
        # Last used first, and of one step the lower index.
        cached = (blocks + [block for block in cached if block not in blocks])[:slots]
    return hits


@pytest.mark.parametrize("slots", [0, 1, 7, 20, 50])
def test_lru(slots: int) -> None:
    rows = random_rows(30, 2, 40, seed=slots)
    _, hits = simulation.lru(rows, [torch.full((2,), 3), torch.full((2,), slots)])
    for row in range(2):
        assert hits[:, row].tolist() == lru_by_hand(rows[:, row], slots)


def test_new_blocks_are_those_that_the_last_step_did_not_keep() -> None:
    rows = torch.tensor([[[1, 1, 0, 0]], [[0, 1, 1, 1]], [[0, 1, 1, 1]]]).bool()
    assert simulation.new_blocks(rows).tolist() == [[2], [0]]


def test_slots_are_shared_by_row_by_layer_or_equally() -> None:
    mean_set = torch.tensor([10.0, 20.0, 40.0, 50.0])
    assert slots_for(mean_set, 2, 2.0, "row").tolist() == [20, 40, 80, 100]
    assert slots_for(mean_set, 2, 2.0, "layer").tolist() == [30, 30, 90, 90]
    assert slots_for(mean_set, 2, 2.0, "equal").tolist() == [60] * 4


def test_summary() -> None:
    """Two layers of two heads; sets that never change are missed once."""
    kept = torch.zeros(8, 2, 2, 20, dtype=torch.bool)
    kept[:, 0, :, :4] = True
    kept[:, 1, :, 6:16] = True
    trace = BlockTrace(kept, torch.full((8,), 20))
    found = summarise([trace, trace], warm_up=2)
    assert found["kept"] == pytest.approx(7 / 20)
    assert found["new_of_kept"] == 0
    assert found["previous_step_only"] == 1
    assert found["by_layer"]["mean_set"] == [4, 10]
    for policy in ("lru", "clock", "clock by age"):
        assert found["rates"]["row"][policy]["warm"] == [1.0] * len(SIZES)
        assert found["rates"]["row"][policy]["all_steps"] == pytest.approx([7 / 8] * len(SIZES))
    # Equal shares of the mean set hold 7 blocks a row: all of 4, and 7 of 10.
    assert found["rates"]["equal"]["lru"]["warm"][0] == pytest.approx(11 / 14)
    assert found["rates"]["layer"]["lru"]["warm"][0] == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


def test_recorded_sets_are_what_the_steps_kept(model: Path) -> None:
    """Counts are the pass's own; the page of a step's token is left out, and step by step nothing differs."""
    replay = Replay(model, device="cpu")
    tokens = torch.randint(0, 256, (330,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt = Prompt("p", "text", tokens[:300], tokens[300:])
    setting = Setting(SparseDecodeOptions(gamma=0.7, sink_tokens=4, window_tokens=8), page_size=16)
    (trace,) = recording.record(replay, prompt, [setting], 30, frozenset())
    assert trace.kept.shape == (30, 2, 2, 21)
    assert trace.blocks.tolist() == [-(-n // 16) for n in range(301, 331)]
    made = replay.force(replay.prefill(prompt.tokens, 30), tokens[300:], setting)
    # A block is a page here: of each row the open one is left out.
    assert torch.equal(trace.kept.sum(-1).transpose(0, 1), made.kept_blocks.long() - 1)
    prefix = replay.prefill(prompt.tokens, 30)
    for index, token in enumerate(tokens[300:]):
        prefix.length = 300 + index
        one = recording._record(replay, prefix, [token], setting)
        blocks = one.kept.shape[-1]
        assert torch.equal(one.kept[0], trace.kept[index][..., :blocks])
        assert not trace.kept[index][..., blocks:].any()


def test_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    out, plot, config = tmp_path / "trace.json", tmp_path / "trace.png", tmp_path / "config.json"
    arguments = ["--model", str(model), "--context", "1500", "--tokens", "12", "--num-prompts", "2", "--warm-up", "2"]
    arguments += ["--gammas", "0.9", "--top-k", "0.047", "--device", "cpu", "--out", str(out), "--plot", str(plot)]
    arguments += ["--config", str(config)]
    assert main(["offload-trace", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "gamma 0.975 (default)" in shown
    assert "clock by age, warm" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(out.read_text())
    assert list(written["results"]) == ["gamma 0.975 (default)", "gamma 0.9", "top-k 0.047"]
    assert written["results"]["top-k 0.047"]["kept"] < 0.2
    options = merge({"config": str(config)})
    assert options.offload
    assert len(options.slot_shares) == 2
    assert options.slot_shares[0] == pytest.approx(
        written["results"]["gamma 0.975 (default)"]["by_layer"]["mean_set"][0], abs=0.1
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warm-up", "128"], "--warm-up is 128: give a number from 0 to below --tokens 128"),
        (["--tokens", "1"], "--tokens is 1: give at least 2"),
        (["--context", "9000"], "--context 9000 exceeds the model's 4096: lower it"),
        (["--out", "trace.txt"], "--out: trace.txt has to end in .json"),
        (["--gammas", "2"], "--sparse-decode-gamma is 2"),
    ],
)
def test_bad_input(arguments: list[str], message: str, model: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["offload-trace", "--model", str(model), "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"benchmarks offload-trace: {message}")
