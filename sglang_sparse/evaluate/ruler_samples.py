"""RULER's samples, made by lm-eval's own tasks, and the file that keeps them for several runs.

They are the first ones that lm-eval makes for a task and a length alone, whatever else is made in the same run.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_sparse.evaluate import tokenizer as tokenizers
from sglang_sparse.evaluate.files import EvaluationError, read_json
from sglang_sparse.evaluate.lm_eval_parts import VERSION, require, ruler_folder
from sglang_sparse.evaluate.ruler_generators import TASKS, TooShortError, shortened

KIND = "ruler-samples"

NETWORK_TASKS = (
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multiquery",
    "niah_multivalue",
    "ruler_qa_squad",
    "ruler_qa_hotpot",
)
"""The tasks that download essays or questions."""

MIN_LENGTH = 256
FIELDS = ("tasks", "samples", "lm_eval", "tokenizer")


def check_tasks(tasks: Sequence[str]) -> None:
    for task in tasks:
        if task in NETWORK_TASKS:
            raise EvaluationError(f"--tasks: {task} downloads its texts, which this does not do: use {' '.join(TASKS)}")
        if task not in TASKS:
            raise EvaluationError(f"--tasks: there is no task {task}: use {' '.join(TASKS)}")
    if len(set(tasks)) != len(tasks):
        raise EvaluationError("--tasks: a task is named twice")


def check_lengths(lengths: Sequence[int]) -> None:
    if min(lengths) < MIN_LENGTH:
        raise EvaluationError(
            f"--lengths: {min(lengths)} is too short for a question and its answer: {MIN_LENGTH} is least"
        )
    if len(set(lengths)) != len(lengths):
        raise EvaluationError("--lengths: a length is named twice")


def make(
    folder: Path, tasks: Sequence[str], lengths: Sequence[int], count: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """`count` samples of each of `tasks` at each of `lengths` (tokens of the tokenizer in `folder`), as `KIND`.

    Each sample has: task, length, id (lm-eval's doc_hash), prompt, prompt_tokens, doc (what scoring needs).
    """
    check_tasks(tasks)
    check_lengths(lengths)
    tokenizer = tokenizers.load(folder)
    check_packages()
    settings: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    for task in tasks:
        for length in lengths:
            start = time.monotonic()
            built = build(task, folder, length, count)
            settings[task] = {
                "generation": dict(built.config.generation_kwargs),
                "scoring": built.config.process_results.__name__,
            }
            made = [sample(tokenizer, task, length, instance) for instance in built.instances]
            check_fit(made, task, length, count, settings[task]["generation"]["max_gen_toks"])
            samples += made
            say(f"{task} {length}: {len(made)} samples ({time.monotonic() - start:.0f} s)")
    return {
        "kind": KIND,
        "lm_eval": VERSION,
        "tokenizer": {"name": folder.resolve().name, "sha256": tokenizers.fingerprint(tokenizer)},
        "tasks": settings,
        "samples": samples,
    }


def check_packages() -> None:
    ruler_folder()
    for name in ("datasets", "nltk", "sacrebleu", "scipy", "wonderwords", "lm_eval.tasks"):
        require(name)


def build(task: str, folder: Path, length: int, count: int) -> Any:
    """lm-eval's task object with its requests, for one length."""
    # Only RULER's folder: lm-eval's whole index has ten thousand files.
    manager = require("lm_eval.tasks").TaskManager(
        include_path=str(ruler_folder()),
        include_defaults=False,
        metadata={"tokenizer": str(folder), "max_seq_lengths": [length]},
    )
    with shortened(task, count):
        try:
            built = manager.load([task])["tasks"][task]
        except TooShortError as error:
            raise EvaluationError(
                f"--lengths: {length} is too short for {task} with this tokenizer: use a longer one"
            ) from error
        except (ValueError, RuntimeError) as error:
            raise EvaluationError(f"--lengths: {length} cannot be made for {task}: {error}") from error
        # As evaluate() does it.
        if built.config.num_fewshot is None:
            built.set_config(key="num_fewshot", value=0)
        built.build_all_requests(limit=count)
    return built


def sample(tokenizer: Any, task: str, length: int, instance: Any) -> dict[str, Any]:
    prompt, _ = instance.args
    # As simple_evaluate logs it, so that its files can be compared with these.
    text = json.dumps(instance.doc, indent=2, ensure_ascii=False)
    return {
        "task": task,
        "length": length,
        "id": hashlib.sha256(text.encode()).hexdigest(),
        "prompt": prompt,
        "prompt_tokens": len(tokenizer(prompt).input_ids),
        # The prompt holds the rest.
        "doc": {name: value for name, value in instance.doc.items() if name not in ("input", "input_example")},
    }


def check_fit(made: list[dict[str, Any]], task: str, length: int, count: int, answer: int) -> None:
    if len(made) != count:
        raise EvaluationError(f"--samples: lm-eval made {len(made)} of {count} samples of {task} at {length}")
    # The text before the answer and special tokens are not in lm-eval's own count.
    longest = max(entry["prompt_tokens"] for entry in made) + answer
    if longest > 1.1 * length + 64:
        raise EvaluationError(f"--lengths: {length} is too short for {task}: its samples take {longest} tokens")


def read(path: Path) -> dict[str, Any]:
    """A file of `make`."""
    content = read_json("--samples-from", path, (KIND,), FIELDS)
    keys = {"task", "length", "id", "prompt", "prompt_tokens", "doc"}
    whole = all(isinstance(entry, dict) and keys <= entry.keys() for entry in content["samples"])
    if (
        not content["samples"]
        or not whole
        or any(entry["task"] not in content["tasks"] for entry in content["samples"])
    ):
        raise EvaluationError(f"--samples-from: {path} is damaged: make it anew with --prepare")
    if content["lm_eval"] != VERSION:
        raise EvaluationError(f"--samples-from: {path} is of lm-eval {content['lm_eval']}, not {VERSION}: make it anew")
    return content


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
