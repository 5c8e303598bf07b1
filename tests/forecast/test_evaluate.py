"""What the evaluation counts, against plain counting, and its command line on a tiny model."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, random_model
from random_model import write_random_model

from sglang_sparse.forecast import evaluate
from sglang_sparse.forecast.evaluation import ORACLE, TRUE, Tallies, evaluate_steps, pooled, resident_before
from sglang_sparse.forecast.heads_file import write_heads
from sglang_sparse.forecast.model_parts import parts_of_transformers
from sglang_sparse.forecast.projections import folded_forecast, query_forecast
from sglang_sparse.forecast.ranking import (
    by_block_mean,
    by_page_mean,
    by_page_midpoint,
    by_thumbnail,
    by_window_mean,
    mean_shares,
    open_mass,
)
from sglang_sparse.forecast.recording import Steps

T, N, BLOCK = 12, 8, 4


def test_resident_blocks_are_those_used_most_lately() -> None:
    rows = [[1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    kept = torch.tensor(rows, dtype=torch.bool)[:, None]
    assert resident_before(kept, 2)[:, 0].int().tolist() == [[0] * 4, [1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 0]]
    assert resident_before(kept, 0)[:, 0].int().tolist() == [[0] * 4, *rows[:3]]


def random_steps(seed: int) -> Steps:
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.ones(T, N, dtype=torch.bool)
    candidates[:, -1] = False
    kept = torch.rand((LAYERS, T, KV_HEADS, N), generator=generator) < 0.3
    return Steps(
        inputs=torch.randn((LAYERS, T, HIDDEN), generator=generator),
        kept=kept & candidates[:, None],
        candidates=candidates,
        keys=torch.randn((LAYERS, N * BLOCK, KV_HEADS, HEAD_DIM), generator=generator),
        positions=N * BLOCK + torch.arange(T),
    )


def test_counts_are_those_of_plain_counting() -> None:
    parts = parts_of_transformers(random_model("LlamaForCausalLM"), positions=64)
    forecast = query_forecast(parts)
    steps, warm_up, budgets = random_steps(0), 3, (0.5, 1.5)
    tallies: Tallies = {}
    arguments = {"cache": 1.0, "budgets": budgets, "warm_up": warm_up}
    evaluate_steps(steps, parts, {"query": forecast}, by_block_mean(BLOCK), tallies=tallies, **arguments)
    for layer in (1, 2, 3):
        kept = steps.kept[layer]
        resident = resident_before(kept, round(kept.sum(-1).double().mean().item()))
        vectors = forecast.vectors(layer, steps.inputs[layer - 1], steps.positions)
        masses = by_block_mean(BLOCK)(vectors, steps.keys[layer], HEAD_DIM**-0.5)
        others = open_mass(vectors, steps.keys[layer], steps.candidates, steps.positions, HEAD_DIM**-0.5)
        shares = mean_shares(masses, steps.candidates, others)
        new = found = named = wanted = 0
        for t in range(warm_up, T):
            missing = {(h, j) for h, j in (kept[t] & ~resident[t]).nonzero().tolist()}
            absent = [(h, j) for h in range(KV_HEADS) for j in range(N - 1) if not resident[t, h, j]]
            absent.sort(key=lambda at: -shares[t, at[0], at[1]].item())
            new += len(missing)
            found += len(missing & set(absent[: math.ceil(1.5 * len(missing))]))
            for h in range(KV_HEADS):
                own = set(kept[t, h].nonzero().flatten().tolist())
                wanted += len(own)
                named += len(own & set(shares[t, h].argsort(descending=True)[: len(own)].tolist()))
        tally = tallies["query", layer]
        assert (tally.new, tally.found[1.5]) == (new, found)
        assert (tally.wanted, tally.named) == (wanted, named)
        oracle = tallies[ORACLE, layer]
        assert oracle.found[1.5] == oracle.new == new
        assert oracle.recall() == 1
        assert oracle.new_recall(0.5) < 1
        assert oracle.found_evenly[0.5] <= oracle.found[0.5] + T
        assert tallies["none", layer].new_recall(1.5) == 0
    everything = [tallies["query", layer] for layer in (1, 2, 3)]
    assert pooled(tallies, "query", 1.5) == sum(t.found[1.5] for t in everything) / sum(t.new for t in everything)
    before = tallies["query", 1].new
    evaluate_steps(random_steps(1), parts, {}, by_block_mean(BLOCK), tallies=tallies, **arguments)
    assert tallies[TRUE, 1].new > before == tallies["query", 1].new


def test_summaries_differ_in_what_they_tell_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn((3, 2, 2, 64), generator=generator) / 4
    keys = torch.randn((64, 2, 64), generator=generator)
    exact = torch.einsum("thrd,nhd->thrn", vectors, keys).unflatten(-1, (-1, 4)).logsumexp(-1)
    torch.testing.assert_close(by_thumbnail(4, 16, 4)(vectors, keys, 1.0), exact, rtol=0, atol=0.5)
    means = torch.einsum("thrd,nhd->thrn", vectors, keys.unflatten(0, (-1, 4)).mean(1)) * 0.5 + math.log(4)
    torch.testing.assert_close(by_block_mean(4)(vectors, keys, 0.5), means)
    for by_page in (by_page_mean(16, 4), by_page_midpoint(16, 4)):
        by_four = by_page(vectors, keys, 1.0).unflatten(-1, (-1, 4))
        assert torch.equal(by_four, by_four[..., :1].expand_as(by_four))
    of_page = torch.einsum("thrd,nhd->thrn", vectors, keys.unflatten(0, (-1, 16)).mean(1)) + math.log(4)
    torch.testing.assert_close(by_page_mean(16, 4)(vectors, keys, 1.0)[..., ::4], of_page)
    # The windows that begin at 0, 16 and 32; two overlap each page of 32.
    of_window = [torch.einsum("thrd,hd->thr", vectors, keys[n : n + 32].mean(0)) for n in (0, 16, 32)]
    pages = torch.stack((torch.maximum(*of_window[:2]), torch.maximum(*of_window[1:])), -1)
    expected = pages.repeat_interleave(2, -1) + math.log(16)
    torch.testing.assert_close(by_window_mean(32, 16)(vectors, keys, 1.0), expected)


def test_shares_are_of_all_tokens_before_the_step() -> None:
    """Blocks of four in full pages of eight, and the tokens of the open page one by one."""
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn((3, 2, 2, 16), generator=generator)
    keys = torch.randn((24, 2, 16), generator=generator)
    positions = torch.tensor([15, 16, 19])
    candidates = torch.arange(6) < (positions // 8 * 2)[:, None]
    scores = torch.einsum("thrd,nhd->thrn", vectors, keys)
    masses = scores.unflatten(-1, (-1, 4)).logsumexp(-1)
    shares = mean_shares(masses, candidates, open_mass(vectors, keys, candidates, positions, 1.0))
    for t, position in enumerate(positions.tolist()):
        full = position // 8 * 2
        expected = scores[t, ..., :position].softmax(-1)[..., : full * 4].unflatten(-1, (-1, 4)).sum(-1).mean(1)
        torch.testing.assert_close(shares[t, :, :full], expected)
        assert not shares[t, :, full:].any()


def test_strided_means_leave_the_open_page_out() -> None:
    """As the server's scores by them do: what the last tokens take changes no ranking."""
    parts = parts_of_transformers(random_model("LlamaForCausalLM"), positions=64)
    forecast, steps = query_forecast(parts), random_steps(0)
    arguments: dict[str, Any] = {"cache": 1.0, "budgets": (1.0,), "warm_up": 3}
    # A step's open page is the last block: of the layer's largest products, or of none.
    found = []
    for open_page in (True, False):
        for scale in (1.0, 30.0):
            keys = steps.keys.clone()
            keys[:, (N - 1) * BLOCK :] *= scale
            tallies: Tallies = {}
            changed = replace(steps, keys=keys)
            masses = by_block_mean(BLOCK)
            evaluate_steps(
                changed, parts, {"query": forecast}, masses, tallies=tallies, open_page=open_page, **arguments
            )
            found.append([tallies["query", layer].found[1.0] for layer in (1, 2, 3)])
    assert found[0] != found[1]
    assert found[2] == found[3]


QUICK = ("--context", "512", "--tokens", "8", "--gamma", "0.9")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from sglang_sparse.calibrate.model import load_model

    folder = write_random_model(tmp_path / "model", layers=3)
    parts = parts_of_transformers(load_model(folder, lambda *_: None, device="cpu", dtype=torch.float32), positions=8)
    heads = {layer: (p.weight, p.bias) for layer, p in folded_forecast(parts).projections.items()}
    write_heads(tmp_path / "heads.safetensors", heads, parts.identity())
    table, picture = tmp_path / "rows.csv", tmp_path / "picture.png"
    text = "".join(f"On day {day} the keeper wrote down the weather. " for day in range(10))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"text": text}))
    flags = (
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--heads",
        str(tmp_path / "heads.safetensors"),
        "--csv",
        str(table),
        "--plot",
        str(picture),
    )
    assert evaluate.main(["--model", str(folder), *QUICK, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model, 512 tokens, 1 prompts, 6 steps, gamma 0.9, cache: 2x the mean set")
    names = [line.split("|")[1].strip() for line in lines[3:]]
    assert names == ["none", "previous step", "query", "query, folded", "heads", "true query", "oracle"]
    rows = {(row["predictor"], row["layer"]): row for row in csv.DictReader(table.read_text().splitlines())}
    assert set(rows) == {(name, layer) for name in names for layer in ("1", "2")}
    for layer in ("1", "2"):
        # These heads are the fold.
        same = [{k: v for k, v in rows[name, layer].items() if k != "predictor"} for name in ("heads", "query, folded")]
        assert same[0] == same[1]
        assert float(rows["oracle", layer]["new_recall_1.5"]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cache", "-1"), "--cache is -1: give 0 or more"),
        (("--budgets", "0"), "--budgets: give numbers above 0"),
        (("--warm-up", "48"), "--warm-up is 48: give a number from 0 to below --tokens 48"),
        (("--plot", "picture.jpg"), "--plot: picture.jpg has to end in .png"),
        (("--model", "nowhere"), "--model nowhere: there is no config.json"),
        (("--tokens", "0"), "--tokens is 0: give a whole number above 0"),
    ],
)
def test_bad_input_is_one_line(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture) -> None:
    assert evaluate.main(["--model", "nowhere", *flags]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
