"""``needle``: one fact in a long text, over a grid of depths and lengths."""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_sparse.evaluate import tokenizer as tokenizers
from sglang_sparse.evaluate.client import Question, ask
from sglang_sparse.evaluate.command_line import positive
from sglang_sparse.evaluate.files import EvaluationError, write_json
from sglang_sparse.evaluate.ruler import digest, means
from sglang_sparse.evaluate.ruler_samples import check_lengths, progress
from sglang_sparse.evaluate.server import Server
from sglang_sparse.files import check_target, write_bytes

KIND = "needle"
TASK = "needle"
GENERATION = {"do_sample": False, "temperature": 0.0, "max_gen_toks": 32, "until": []}
"""Greedy; the answer is a number of seven digits."""

INTRODUCTION = "A number is hidden in the following report. Remember it, I will ask for it afterwards.\n\n"
NEEDLE = "The access code of the archive in {city} is {code}."
QUESTION = "\n\nWhat is the access code of the archive in {city}? The access code of the archive in {city} is"

CITIES = ("Bergen", "Cadiz", "Dresden", "Ghent", "Lisbon", "Odense", "Porto", "Riga", "Tartu", "Utrecht")
WHO = ("The baker", "A teacher", "The postman", "An old sailor", "The gardener", "A clerk", "The miller", "Her cousin")
DID = ("repaired", "painted", "sold", "borrowed", "carried", "measured", "cleaned", "looked for", "described")
WHAT = ("a wooden boat", "two lanterns", "the blue door", "a basket of apples", "the church clock", "a long ladder")
WHERE = ("near the mill", "at the market", "behind the school", "on the bridge", "by the river", "in the square")
WHEN = ("early in the morning", "after the rain", "on Tuesday", "before sunset", "during the festival", "at noon")
THEN = ("and went home", "and told nobody", "while the bells rang", "although it was late", "as they had agreed")


def run(arguments: argparse.Namespace) -> int:
    check_lengths(arguments.lengths)
    if not arguments.base_url:
        raise EvaluationError("--base-url: give the server's address")
    if not arguments.tokenizer:
        raise EvaluationError("--tokenizer: name the model's folder, which sizes the texts")
    if not arguments.out:
        raise EvaluationError("--out: name the file for the results")
    check_target("--out", arguments.out, (".json", ".gz"))
    tokenizers.check_folder(arguments.tokenizer)
    if arguments.plot:
        from sglang_sparse.evaluate import plot

        check_target("--plot", arguments.plot, (".png",))
        plot.check_package()
    server = Server.at(arguments.base_url, arguments.model, arguments.context)
    for length in arguments.lengths:
        server.check_room(length, f"length {length}")
    tokenizer = tokenizers.load(arguments.tokenizer)
    samples = make(tokenizer, arguments.lengths, arguments.depths, arguments.repeats, arguments.seed)
    progress(f"{len(samples)} prompts made")
    result = evaluate(server, samples, arguments.concurrency, arguments.timeout)
    result["tokenizer"] = {
        "name": arguments.tokenizer.resolve().name,
        "sha256": tokenizers.fingerprint(tokenizer),
    }
    if arguments.plot:
        # Drawn first: if that fails, neither file is written.
        picture = plot.heat_map(result["grid"], f"{Path(server.model).name}: facts found")
        write_bytes(arguments.plot, picture)
        progress(f"wrote {arguments.plot}")
    write_json(arguments.out, result)
    progress(f"wrote {arguments.out}")
    return 0


def depths(count: int) -> list[float]:
    """`count` places of the fact, in percent of the text, from its start to its end; the middle if there is one."""
    return [round(100 * index / (count - 1), 1) for index in range(count)] if count > 1 else [50.0]


def make(tokenizer: Any, lengths: Sequence[int], count: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """`repeats` prompts for each of `lengths` (tokens, answer included) and `count` depths; the seed decides all."""
    samples = []
    for length in lengths:
        sentences, sizes = filler(tokenizer, length, seed)
        for depth in depths(count):
            for repeat in range(repeats):
                generator = random.Random(f"{seed}/{length}/{depth}/{repeat}")
                prompt, code, tokens = text(tokenizer, length, depth, sentences, sizes, generator)
                samples.append(
                    {
                        "task": TASK,
                        "length": length,
                        "depth": depth,
                        "id": hashlib.sha256(prompt.encode()).hexdigest(),
                        "prompt": prompt,
                        "prompt_tokens": tokens,
                        "code": code,
                    }
                )
    return samples


def filler(tokenizer: Any, length: int, seed: int) -> tuple[list[str], list[int]]:
    """More than enough different sentences for `length` tokens, and the tokens of each."""
    generator = random.Random(f"{seed}/{length}")
    parts = (WHO, DID, WHAT, WHERE, WHEN, THEN)
    sentences = [" ".join(generator.choice(part) for part in parts) + "." for _ in range(length // 6)]
    encoded = tokenizer([" " + sentence for sentence in sentences], add_special_tokens=False).input_ids
    return sentences, [len(ids) for ids in encoded]


def text(
    tokenizer: Any, length: int, depth: float, sentences: list[str], sizes: list[int], generator: random.Random
) -> tuple[str, str, int]:
    """A prompt that fills `length` tokens together with its answer, the number in it, and its tokens."""
    city, code = generator.choice(CITIES), str(generator.randrange(10**6, 10**7))
    needle, question = NEEDLE.format(city=city, code=code), QUESTION.format(city=city)
    limit = length - int(GENERATION["max_gen_toks"])  # type: ignore[call-overload]
    room = limit - len(tokenizer(INTRODUCTION + needle + question).input_ids)
    order = generator.sample(range(len(sentences)), len(sentences))
    used = 0
    while used < len(order) and sizes[order[used]] <= room:
        room -= sizes[order[used]]
        used += 1
    while used > 0:
        lines = [sentences[index] for index in order[:used]]
        lines.insert(round(depth / 100 * used), needle)
        prompt = INTRODUCTION + " ".join(lines) + question
        tokens = len(tokenizer(prompt).input_ids)
        if tokens <= limit:
            return prompt, code, tokens
        used -= 1
    raise EvaluationError(f"--lengths: {length} is too short for the question with this tokenizer: use a longer one")


def evaluate(server: Server, samples: list[dict[str, Any]], concurrency: int, timeout: int) -> dict[str, Any]:
    questions = [
        Question(f"length {sample['length']}", sample["prompt"], sample["prompt_tokens"], GENERATION)
        for sample in samples
    ]
    answers = ask(server, questions, concurrency, timeout)
    scored = [
        {name: sample[name] for name in ("task", "length", "depth", "id")}
        | {"score": float(sample["code"] in answer), "answer": str(answer), "finish_reason": answer.finish}
        for sample, answer in zip(samples, answers, strict=True)
    ]
    return {
        "kind": KIND,
        "model": server.model,
        "server": server.report(),
        "samples_sha256": digest(scored),
        "concurrency": concurrency,
        "results": means(scored),
        "grid": grid(scored),
        "samples": scored,
    }


def grid(scored: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean scores, a row per depth and a column per length."""
    rows = sorted({sample["depth"] for sample in scored})
    columns = sorted({sample["length"] for sample in scored})
    cells: dict[tuple[float, int], list[float]] = {}
    for sample in scored:
        cells.setdefault((sample["depth"], sample["length"]), []).append(sample["score"])
    scores = [[sum(cells[row, column]) / len(cells[row, column]) for column in columns] for row in rows]
    return {"depths": rows, "lengths": columns, "scores": scores}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--depths", type=positive, default=11, help="places of the fact, from start to end (default 11)"
    )
    parser.add_argument("--repeats", type=positive, default=3, help="prompts for each place and length (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default 0)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the grid, too")
