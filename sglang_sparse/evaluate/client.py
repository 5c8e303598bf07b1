"""Asks the server all prompts at once, through lm-eval's own ``local-completions`` model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang_sparse.evaluate.files import EvaluationError
from sglang_sparse.evaluate.lm_eval_parts import require, ruler_folder
from sglang_sparse.evaluate.server import Server

RETRIES = 3
LOGGER = "lm_eval.models.api_models"
FINISHED = ("stop", "length")
SPECIAL_TOKENS = 2
"""How many tokens a server may add to a prompt, or leave out, that its tokenizer does not."""


@dataclass(frozen=True)
class Question:
    """`tokens`: how many the prompt has; `generation`: lm-eval's generation_kwargs, with max_gen_toks."""

    name: str
    prompt: str
    tokens: int
    generation: dict[str, Any]

    @property
    def needed(self) -> int:
        return self.tokens + int(self.generation["max_gen_toks"])


class Answer(str):
    """The generated text, with why it ended and how many prompt tokens the server counted, if it says so."""

    finish: str | None = None
    prompt_tokens: int | None = None


class Messages(logging.Handler):
    """Keeps what lm-eval logs about a failed request: its exception has only the status."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.first is None and "request failed" in text:
            self.first = " ".join(text.split()).removesuffix(" Retrying...")[:500]


def ask(server: Server, questions: Sequence[Question], concurrency: int, timeout: int) -> list[Answer]:
    """The server's greedy answers, in order. Errors of the server, and answers that it broke off, are raised."""
    for question in questions:
        server.check_room(question.needed, question.name)
    # The shortest one first and alone: what would go wrong everywhere goes wrong at once.
    shortest = min(questions, key=lambda question: question.tokens)
    probe = Question(shortest.name, shortest.prompt, shortest.tokens, {**shortest.generation, "max_gen_toks": 1})
    check([probe], request(server, [probe], 1, timeout), probing=True)
    answers = request(server, questions, concurrency, timeout)
    check(questions, answers)
    return answers


def check(questions: Sequence[Question], answers: Sequence[Answer], probing: bool = False) -> None:
    """Raises if an answer is no answer to its whole prompt."""
    for question, answer in zip(questions, answers, strict=True):
        if answer.finish not in FINISHED:
            raise EvaluationError(
                f"the server broke off its answer to {question.name} (finish_reason {answer.finish}): see its log"
            )
        counted = answer.prompt_tokens
        if counted is not None and abs(counted - question.tokens) > SPECIAL_TOKENS:
            raise EvaluationError(
                f"the server counts {counted} tokens in the prompt of {question.name}, not {question.tokens}: "
                f"--tokenizer is not the model's, or the server cuts prompts"
            )
    if not probing and len(answers) > 1 and not any(answer.strip() for answer in answers):
        raise EvaluationError(f"all {len(answers)} answers are empty: try a prompt by hand and see the server's log")


def request(server: Server, questions: Sequence[Question], concurrency: int, timeout: int) -> list[Answer]:
    model = local_completions(
        model=server.model,
        base_url=f"{server.url}/v1/completions",
        # The server tokenizes, so that special tokens are its own.
        tokenizer_backend="None",
        num_concurrent=concurrency,
        max_retries=RETRIES,
        timeout=timeout,
        batch_size=1,
    )
    instance = require("lm_eval.api.instance").Instance
    instances = [
        instance("generate_until", {}, (question.prompt, dict(question.generation)), index)
        for index, question in enumerate(questions)
    ]
    errors = tuple(
        getattr(require(module), name)
        for module, name in (("aiohttp", "ClientError"), ("requests", "RequestException"))
    )
    with messages() as log:
        try:
            answers = model.generate_until(instances)
        except (*errors, asyncio.TimeoutError, OSError) as error:
            reason = log.first or str(error) or type(error).__name__
            raise EvaluationError(f"a request failed {RETRIES} times: {reason}") from error
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EvaluationError(f"the server's answer is no completion: {log.first or error!r}") from error
        finally:
            end_progress()
    if len(answers) != len(questions) or not all(isinstance(answer, Answer) for answer in answers):
        raise EvaluationError("the server's answers lack a text: is it an OpenAI-compatible completions server?")
    return list(answers)


def local_completions(**options: Any) -> Any:
    """lm-eval's model; its answers are of the type `Answer`."""
    ruler_folder()
    for name in ("aiohttp", "requests", "tenacity", "tqdm"):
        require(name)
    base = require("lm_eval.models.openai_completions").LocalCompletionsAPI

    class Completions(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def parse_generations(outputs: Any, **kwargs: Any) -> list[Answer | None]:
            texts = base.parse_generations(outputs, **kwargs)
            replies = outputs if isinstance(outputs, list) else [outputs]
            return [wrapped(text, reply) for text, reply in zip(texts, replies, strict=True)]

    with messages():
        return Completions(**options)


def wrapped(text: str | None, reply: dict[str, Any]) -> Answer | None:
    if text is None:
        return None
    answer = Answer(text)
    answer.finish = reply["choices"][0].get("finish_reason")
    answer.prompt_tokens = (reply.get("usage") or {}).get("prompt_tokens")
    return answer


def end_progress() -> None:
    """Ends the lines of lm-eval's progress bars, of which it leaves some open."""
    for bar in list(getattr(require("tqdm").tqdm, "_instances", ())):
        bar.close()


@contextmanager
def messages() -> Iterator[Messages]:
    """While it lasts, lm-eval's warnings are kept instead of printed."""
    logger = logging.getLogger(LOGGER)
    handler, propagate, level = Messages(), logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)
