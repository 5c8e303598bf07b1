from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_sparse.calibrate.errors import CalibrationError
from sglang_sparse.calibrate.model import load_tokenizer
from sglang_sparse.calibrate.prompts import _text, generate_prompts, read_prompts


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return load_tokenizer(model_folder)


def write(folder: Path, *entries: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return file


def test_the_end_of_a_text_is_forced(tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path, {"text": "a" * 50 + "bcde"}, "", {"text": "x" * 30})
    first, second = read_prompts(file, tokenizer, context=60, tokens=4)
    assert tokenizer.decode(first.tokens) == "a" * 50
    assert first.forced is not None
    assert tokenizer.decode(first.forced) == "bcde"
    assert (first.name, second.name) == ("line 1", "line 3")


def test_a_chat_is_answered_by_the_model(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}:"
    try:
        (prompt,) = read_prompts(
            write(tmp_path, {"messages": [{"role": "user", "content": "hi"}]}), tokenizer, context=60, tokens=4
        )
        assert tokenizer.decode(prompt.tokens) == "<hi>:"
        assert prompt.forced is None
        with pytest.raises(CalibrationError, match='line 1: "messages" does not fit the chat template'):
            read_prompts(write(tmp_path, {"messages": 3}), tokenizer, context=60, tokens=4)
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "is empty: give one object a line"),
        (["", "  "], "is empty"),
        (["{"], "line 1: not valid JSON"),
        (["[" * 10**5], "line 1: not valid JSON"),
        (["1" * 5000], "line 1: not valid JSON"),
        ([{"text": "a" * 20}, {"text": "a" * 7}], "line 2: the text has 7 tokens: give at least 8"),
        ([{"text": "a" * 61}], "line 1: 57 tokens and 4 more exceed the context of 60"),
        ([{"text": 3}], 'line 1: "text" is no string'),
        ([{"txt": "a"}], 'line 1: give an object with "text" or "messages"'),
        ([{"text": "a", "messages": []}], "line 1: give an object"),
        (["[1]"], "line 1: give an object"),
        ([{"text": "a\ud83d" * 20}], '"text" cannot be tokenised'),
        ([{"messages": [{"role": "user", "content": "hi"}]}], "line 1: the tokenizer has no chat template"),
    ],
)
def test_wrong_files_are_refused(entries: list, message: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=message):
        read_prompts(write(tmp_path, *entries), tokenizer, context=60, tokens=4)


def test_other_line_separators_may_stand_in_strings(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"text": "a\u2028b\u0085c" * 5}, ensure_ascii=False))
    assert len(read_prompts(file, tokenizer, context=100, tokens=4)) == 1


def test_unreadable_files_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"--prompts .*: cannot be read"):
        read_prompts(tmp_path / "missing.jsonl", tokenizer, context=60, tokens=4)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_prompts(binary, tokenizer, context=60, tokens=4)


def test_generated_prompts_fill_the_context_and_repeat(tokenizer: Any) -> None:
    made = generate_prompts(tokenizer, context=3000, count=4, tokens=16)
    assert [prompt.name for prompt in made] == ["retrieval-0", "code-1", "prose-2", "retrieval-3"]
    for prompt in made:
        assert 0.95 * 3000 <= len(prompt.tokens) + 16 <= 3000
        assert prompt.forced is None or len(prompt.forced) == 16
    assert made == generate_prompts(tokenizer, context=3000, count=4, tokens=16)
    other = generate_prompts(tokenizer, context=3000, count=4, tokens=16, seed=1)
    assert all(a.tokens != b.tokens for a, b in zip(made, other, strict=True))
    assert made[0].tokens != made[3].tokens


def test_retrieval_prompts_hold_what_they_ask_for(tokenizer: Any) -> None:
    text = tokenizer.decode(generate_prompts(tokenizer, context=3000, count=1, tokens=16)[0].tokens)
    asked = text.rpartition("access codes of ")[2].partition(", one a line")[0].split(", ")
    assert len(asked) == 6
    assert all(f"The access code of the {key} is " in text for key in asked)


class _Cheap:
    """A tokenizer of one token a hundred characters."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[0] * (len(text) // 100 + 1))


def test_too_short_a_context_is_refused(tokenizer: Any) -> None:
    with pytest.raises(CalibrationError, match="is too short for the generated prompts"):
        generate_prompts(tokenizer, context=300, count=1, tokens=16)
    with pytest.raises(CalibrationError, match=r"Python's own prose has \d+ tokens, fewer than a context of 9000000"):
        _text("p", "prose", _Cheap(), 8_999_984, 16, random.Random(0))
