"""Several requests at a time: all at once, or a closed loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.errors import ServerError

from .client import Answer, Client
from .divergence import Scored


def warm(client: Client, prompts: Sequence[list[int]]) -> list[Answer]:
    """Prefills each prompt, one after another: the prefix cache then holds them. The answers, of one token."""
    return [client.generate(prompt, 1) for prompt in prompts]


def all_at_once(client: Client, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
    """One answer a prompt, all requests started together."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: client.generate(prompt, tokens), prompts))


def score_at_once(client: Client, prompts: Sequence[list[int]], tokens: int) -> list[Scored]:
    """One scored answer a prompt, all requests started together."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: client.score(prompt, tokens), prompts))


def closed_loop(
    client: Client, next_prompt: Callable[[int], list[int]], *, concurrency: int, requests: int, tokens: int
) -> list[Answer]:
    """Answers of `requests` requests, of which `concurrency` run at any time: each that ends starts the next.

    `next_prompt` gives the prompt of request number `i`. The first error ends the loop and is raised.
    """
    answers: list[Answer] = []
    taken = iter(range(requests))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                number = next(taken, None)
            if number is None:
                return
            try:
                answer = client.generate(next_prompt(number), tokens)
            except BaseException as error:
                errors.append(error)
                return
            with lock:
                answers.append(answer)

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers


def check_cached(answers: Sequence[Answer], prefix: int) -> None:
    """Raises ServerError unless all but a page of every prefix was in the cache: else prefill was timed too."""
    least = min(answer.cached for answer in answers)
    if least < prefix - 256:
        raise ServerError(
            f"only {least} of {prefix} prompt tokens were in the prefix cache: fewer prompts have to fit into it"
        )
