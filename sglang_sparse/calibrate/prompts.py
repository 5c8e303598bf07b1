"""Prompts to measure on: from a JSONL file, or generated without a download."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_sparse.calibrate.errors import CalibrationError


@dataclass(frozen=True)
class Prompt:
    """Tokens to prefill, and the tokens to force after them; None to force what dense decode says."""

    name: str
    kind: str
    """Prompts of one kind are alike; a held-out part has some of each."""
    tokens: list[int]
    forced: list[int] | None


def read_prompts(path: Path, tokenizer: Any, *, context: int, tokens: int) -> list[Prompt]:
    """The prompts of a JSONL file: one object a line, `{"text": ...}` or `{"messages": [...]}`.

    Of a text, the last `tokens` tokens are forced; after a chat, dense decode's greedy answer is.

    Raises:
        CalibrationError: the file cannot be read or is empty, a line is malformed, or a prompt does not fit `context`.
    """
    try:
        # Not splitlines: JSON strings may hold other line separators as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"--prompts {path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"--prompts {path}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"{where}: not valid JSON ({error})") from None
        prompts.append(_prompt(entry, where, tokenizer, context, tokens))
    if not prompts:
        raise CalibrationError(f'--prompts {path} is empty: give one object a line, such as {{"text": "..."}}')
    return prompts


def _prompt(entry: Any, where: str, tokenizer: Any, context: int, tokens: int) -> Prompt:
    if not isinstance(entry, dict) or len({"text", "messages"} & set(entry)) != 1:
        raise CalibrationError(f'{where}: give an object with "text" or "messages"')
    if "text" in entry:
        if not isinstance(entry["text"], str):
            raise CalibrationError(f'{where}: "text" is no string')
        try:
            ids = tokenizer(entry["text"]).input_ids
        except (TypeError, UnicodeError) as error:  # lone surrogates
            raise CalibrationError(f'{where}: "text" cannot be tokenised ({error})') from None
        if len(ids) < 2 * tokens:
            raise CalibrationError(
                f"{where}: the text has {len(ids)} tokens: give at least {2 * tokens}, or lower --tokens {tokens}"
            )
        prompt, forced = ids[:-tokens], ids[-tokens:]
    else:
        prompt, forced = _chat(tokenizer, entry["messages"], where), None
    if len(prompt) + tokens > context:
        raise CalibrationError(
            f"{where}: {len(prompt)} tokens and {tokens} more exceed the context of {context}: shorten it"
        )
    return Prompt(where.rpartition(", ")[2], "text" if "text" in entry else "chat", prompt, forced)


def _chat(tokenizer: Any, messages: Any, where: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise CalibrationError(f'{where}: the tokenizer has no chat template: give "text" instead of "messages"')
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        raise CalibrationError(f'{where}: "messages" does not fit the chat template ({error})') from None
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise CalibrationError(f'{where}: the chat template makes no tokens of "messages"')
    return ids


# --- generated prompts ---------------------------------------------------------------------------------------------

_NAMES = "amber birch cedar delta ember fjord grove heron inlet jetty knoll larch maple nacre ochre perch quarry reef"
_VERBS = "carried counted described followed lifted measured painted repaired sketched sorted weighed wrapped"
_NOUNS = "anchor barrel candle compass crate ladder lantern ledger mirror parcel pebble rope sail shell spade wheel"
_PLACES = "attic bakery barn bridge cellar chapel garden harbour library market meadow mill orchard pier school tower"


def generate_prompts(tokenizer: Any, *, context: int, count: int, tokens: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts that fill `context` with the forced `tokens`: retrieval, code and prose in turn.

    Retrieval asks for codes hidden in a story; code is the source of Python's standard library, prose its
    documentation, which every installation holds.
    """
    makers: tuple[tuple[str, Callable[..., Prompt]], ...] = (
        ("retrieval", _retrieval),
        ("code", _text),
        ("prose", _text),
    )
    prompts = []
    for index in range(count):
        kind, maker = makers[index % len(makers)]
        generator = random.Random(f"{seed}-{index}")
        prompts.append(maker(f"{kind}-{index}", kind, tokenizer, context - tokens, tokens, generator))
    return prompts


def _retrieval(name: str, kind: str, tokenizer: Any, room: int, tokens: int, generator: random.Random) -> Prompt:
    words = [text.split() for text in (_NAMES, _VERBS, _NOUNS, _PLACES)]
    keys = [f"{generator.choice(words[0])} {noun}" for noun in generator.sample(words[2], 12)]
    codes = {key: generator.randrange(10000, 100000) for key in keys}

    def sentence() -> str:
        who, verb, what, where = (generator.choice(group) for group in words)
        return f"{who.capitalize()} {verb} the {what} near the {where} on day {generator.randrange(1, 366)}."

    asked = ", ".join(keys[:6])
    question = f"\n\nList the access codes of {asked}, one a line, as name: code."

    def build(sentences: int) -> list[int]:
        story = [sentence() for _ in range(sentences)]
        for key, code in codes.items():
            story.insert(generator.randrange(len(story) + 1), f"The access code of the {key} is {code}.")
        text = " ".join(story) + question
        if getattr(tokenizer, "chat_template", None) is None:
            return tokenizer(text + "\n").input_ids
        return _chat(tokenizer, [{"role": "user", "content": text}], name)

    probe = build(64)
    fixed = len(build(0))
    sentences = int((room - fixed) / max(1.0, (len(probe) - fixed) / 64))
    while sentences >= 0:
        ids = build(sentences)
        if len(ids) <= room:
            return Prompt(name, kind, ids, None)
        sentences -= max(1, sentences // 100)
    raise CalibrationError(
        f"a context of {room + tokens} tokens is too short for the generated prompts: raise --context"
    )


def _sources(kind: str, generator: random.Random) -> Iterator[str]:
    if kind == "prose":
        from pydoc_data.topics import topics

        titles = sorted(topics)
        generator.shuffle(titles)
        yield from (topics[title] for title in titles)
        return
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    generator.shuffle(files)
    for file in files:
        try:
            yield f"# {file.name}\n{file.read_text(encoding='utf-8')}"
        except (OSError, UnicodeDecodeError):
            continue


def _text(name: str, kind: str, tokenizer: Any, room: int, tokens: int, generator: random.Random) -> Prompt:
    ids: list[int] = []
    for text in _sources(kind, generator):
        ids.extend(tokenizer(text, add_special_tokens=not ids).input_ids)
        if len(ids) >= room + tokens:
            break
    if len(ids) < room + tokens:
        raise CalibrationError(
            f"Python's own {kind} has {len(ids)} tokens, fewer than a context of {room + tokens}: "
            "lower --context, or give --prompts"
        )
    ids = ids[: room + tokens]
    return Prompt(name, kind, ids[:-tokens], ids[-tokens:])
