"""``ruler``: lm-eval's RULER tasks against a server, with samples that several runs share."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from sglang_sparse.evaluate import ruler_samples
from sglang_sparse.evaluate.client import Question, ask
from sglang_sparse.evaluate.command_line import positive
from sglang_sparse.evaluate.files import EvaluationError, write_json
from sglang_sparse.evaluate.lm_eval_parts import scorer
from sglang_sparse.evaluate.ruler_generators import MAX_SAMPLES, TASKS
from sglang_sparse.evaluate.server import RESERVED, Server
from sglang_sparse.evaluate.tokenizer import check_folder
from sglang_sparse.files import check_target

KIND = "ruler"


def run(arguments: argparse.Namespace) -> int:
    check_options(arguments)
    if arguments.prepare:
        prepared = made(arguments)
        write_json(arguments.prepare, prepared)
        needed = max(question.needed for question in questions_of(prepared)) + RESERVED
        ruler_samples.progress(f"wrote {arguments.prepare}: needs a server with a context of {needed} tokens")
        return 0
    server = Server.at(arguments.base_url, arguments.model, arguments.context)
    if arguments.samples_from:
        prepared = ruler_samples.read(arguments.samples_from)
    else:
        # Before the samples are made: that takes minutes.
        for length in arguments.lengths:
            server.check_room(length, f"length {length}")
        prepared = made(arguments)
    write_json(arguments.out, evaluate(server, prepared, arguments.concurrency, arguments.timeout))
    ruler_samples.progress(f"wrote {arguments.out}")
    return 0


def check_options(arguments: argparse.Namespace) -> None:
    ruler_samples.check_tasks(arguments.tasks)
    ruler_samples.check_lengths(arguments.lengths)
    if arguments.samples > MAX_SAMPLES:
        raise EvaluationError(f"--samples: lm-eval makes {MAX_SAMPLES} at most, not {arguments.samples}")
    if arguments.prepare and arguments.samples_from:
        raise EvaluationError("--prepare and --samples-from exclude each other")
    if arguments.prepare:
        check_target("--prepare", arguments.prepare, (".json", ".gz"))
    else:
        if not arguments.base_url:
            raise EvaluationError("--base-url: give the server's address, or make samples only with --prepare")
        if not arguments.out:
            raise EvaluationError("--out: name the file for the results")
        check_target("--out", arguments.out, (".json", ".gz"))
    if not arguments.samples_from:
        if not arguments.tokenizer:
            raise EvaluationError(
                "--tokenizer: name the model's folder, which sizes the samples, or use --samples-from"
            )
        check_folder(arguments.tokenizer)


def made(arguments: argparse.Namespace) -> dict[str, Any]:
    return ruler_samples.make(
        arguments.tokenizer, arguments.tasks, arguments.lengths, arguments.samples, ruler_samples.progress
    )


def evaluate(server: Server, prepared: dict[str, Any], concurrency: int, timeout: int) -> dict[str, Any]:
    """Answers and scores of all `prepared` samples, as `KIND`."""
    settings, samples = prepared["tasks"], prepared["samples"]
    scorers = {task: scorer(setting["scoring"]) for task, setting in settings.items()}
    answers = ask(server, questions_of(prepared), concurrency, timeout)
    scored = [
        {
            "task": sample["task"],
            "length": sample["length"],
            "id": sample["id"],
            "score": scorers[sample["task"]](sample["doc"], answer),
            "answer": str(answer),
            "finish_reason": answer.finish,
        }
        for sample, answer in zip(samples, answers, strict=True)
    ]
    return {
        "kind": KIND,
        "model": server.model,
        "server": server.report(),
        "lm_eval": prepared["lm_eval"],
        "tokenizer": prepared["tokenizer"],
        "samples_sha256": digest(scored),
        "concurrency": concurrency,
        "results": means(scored),
        "samples": scored,
    }


def questions_of(prepared: dict[str, Any]) -> list[Question]:
    return [
        Question(
            f"{sample['task']} {sample['length']}",
            sample["prompt"],
            sample["prompt_tokens"],
            prepared["tasks"][sample["task"]]["generation"],
        )
        for sample in prepared["samples"]
    ]


def means(scored: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per task and length: mean score, count of samples, and how many answers were empty."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for sample in scored:
        groups[sample["task"], sample["length"]].append(sample)
    return [
        {
            "task": task,
            "length": length,
            "score": sum(sample["score"] for sample in group) / len(group),
            "samples": len(group),
            "empty_answers": sum(not sample["answer"].strip() for sample in group),
        }
        for (task, length), group in groups.items()
    ]


def digest(scored: list[dict[str, Any]]) -> str:
    """Equal for runs over the same samples."""
    ids = sorted((sample["task"], sample["length"], sample["id"]) for sample in scored)
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=list(TASKS),
        metavar="TASK",
        help=f"default: {' '.join(TASKS)}",
    )
    parser.add_argument("--samples", type=positive, default=50, help="of each task and length (default 50)")
    parser.add_argument(
        "--prepare", type=Path, metavar="FILE", help="only make the samples and write them (.json or .json.gz)"
    )
    parser.add_argument("--samples-from", type=Path, metavar="FILE", help="use the samples of a --prepare file")
