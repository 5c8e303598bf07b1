"""The needle grid: prompts of the right size with the fact in its place, and scores where they belong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from transformers import AutoTokenizer

from sglang_sparse.evaluate import needle
from sglang_sparse.evaluate.__main__ import main

LENGTHS = [400, 900]


@pytest.fixture(scope="module")
def tokenizer(word_tokenizer: Path) -> Any:
    return AutoTokenizer.from_pretrained(word_tokenizer)


def place(prompt: str) -> float:
    """Where the fact is among the sentences, in percent."""
    sentences = prompt[len(needle.INTRODUCTION) : prompt.rindex("\n\nWhat is")].split(". ")
    (index,) = [index for index, sentence in enumerate(sentences) if "access code" in sentence]
    return 100 * index / (len(sentences) - 1)


def test_prompts_fill_the_length_and_hold_the_fact_once_at_its_depth(tokenizer: Any) -> None:
    samples = needle.make(tokenizer, LENGTHS, 5, 2, seed=0)
    assert [sample["depth"] for sample in samples[::2]] == [0.0, 25.0, 50.0, 75.0, 100.0] * 2
    assert len({sample["id"] for sample in samples}) == len(samples) == 20
    for sample in samples:
        size = len(tokenizer(sample["prompt"]).input_ids)
        assert size == sample["prompt_tokens"]
        # Full but for one sentence.
        assert sample["length"] - 32 - 30 < size <= sample["length"] - 32
        assert sample["prompt"].count(sample["code"]) == 1
        assert re.search(rf"is {sample['code']}\.", sample["prompt"])
        assert place(sample["prompt"]) == pytest.approx(sample["depth"], abs=5)


def test_equal_seeds_give_equal_prompts_and_others_give_others(tokenizer: Any) -> None:
    first = needle.make(tokenizer, [400], 3, 2, seed=0)
    assert needle.make(tokenizer, [400], 3, 2, seed=0) == first
    assert not {s["id"] for s in first} & {s["id"] for s in needle.make(tokenizer, [400], 3, 2, seed=1)}


def test_the_grid_shows_where_facts_are_missed(
    server: FakeServer, tokenizer: Any, word_tokenizer: Path, tmp_path: Path
) -> None:
    server.count = lambda prompt: len(tokenizer(prompt).input_ids)
    # Blind to the middle of long texts.
    server.reply = lambda prompt: (
        {"text": " 1"} if server.count and server.count(prompt) > 500 and 40 < place(prompt) < 60 else {}
    )
    command = [
        "needle",
        "--base-url",
        server.url,
        "--tokenizer",
        str(word_tokenizer),
        "--depths",
        "3",
        "--repeats",
        "2",
    ]
    command += ["--lengths", *map(str, LENGTHS), "--out", str(tmp_path / "grid.json")]
    assert main([*command, "--plot", str(tmp_path / "grid.png")]) == 0
    result = json.loads((tmp_path / "grid.json").read_text())
    assert result["grid"] == {
        "depths": [0.0, 50.0, 100.0],
        "lengths": LENGTHS,
        "scores": [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]],
    }
    assert [row["score"] for row in result["results"]] == [1.0, pytest.approx(2 / 3)]
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.json", "grid.png"]
