"""Prompts of runs of equal tokens: what a query finds in one token of a run, it finds in its neighbours too."""

from __future__ import annotations

import random
from collections.abc import Sequence

RUN_LENGTH = 64
"""Mean tokens of a run: a page."""

FIRST_TOKEN = 1000
"""Tokens below are left to the tokenizer's own."""


def run_prompt(tokens: int, vocabulary: int, *, seed: int, run_length: int = RUN_LENGTH) -> list[int]:
    """`tokens` token ids in runs of equal ones, a quarter to seven quarters of `run_length` long.

    Prompts of different seeds differ from the first token on, as far as the vocabulary allows, so that none is another
    one's prefix.
    """
    rng = random.Random(seed)
    lowest = min(FIRST_TOKEN, vocabulary // 2)
    # The first token tells prompts apart by their seed alone.
    token = lowest + seed % (vocabulary - lowest)
    prompt: list[int] = []
    while len(prompt) < tokens:
        prompt += [token] * rng.randint(max(run_length // 4, 1), max(7 * run_length // 4, 1))
        token = rng.randrange(lowest, vocabulary)
    return prompt[:tokens]


def distinct_prompts(
    count: int, tokens: int, vocabulary: int, *, seed: int = 0, run_length: int = RUN_LENGTH
) -> list[list[int]]:
    """`count` prompts of which none starts as another does."""
    seeds = range(seed * 100_003, seed * 100_003 + count)
    return [run_prompt(tokens, vocabulary, seed=each, run_length=run_length) for each in seeds]


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all `prompts` begin with."""
    length = 0
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return length
