"""With rule `all`, sparse decode answers token for token what dense decode answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.server

SPARSE = ("--sparse-decode", "--sparse-decode-rule", "all", "--chunked-prefill-size", "256")
TOKENS = 24


def random_prompts() -> list[list[int]]:
    """20 prompts of 10 to 3,000 tokens, around the borders of blocks, pages and chunks too."""
    lengths = [10, 15, 16, 17, 63, 64, 65, 127, 128, 200, 255, 256, 257, 400, 512, 700, 1000, 1023, 2000, 3000]
    generator = random.Random(1)
    return [[generator.randrange(256) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def dense_answers(start_server: Any, random_llama: Path) -> list[list[int]]:
    server = start_server(random_llama)
    answers = [answer["output_ids"] for answer in server.generate_many(random_prompts(), TOKENS, at_once=1)]
    assert len({tuple(answer) for answer in answers}) == len(answers), "answers that do not depend on the prompt"
    return answers


@pytest.mark.parametrize("at_once", [1, 8])
def test_rule_all_equals_dense(
    start_server: Any, random_llama: Path, dense_answers: list[list[int]], at_once: int
) -> None:
    server = start_server(random_llama, *SPARSE)
    server.flush()
    answers = server.generate_many(random_prompts(), TOKENS, at_once)
    assert [answer["output_ids"] for answer in answers] == dense_answers
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) == 0


def test_rule_all_equals_dense_with_shared_prefixes(
    start_server: Any, random_llama: Path, dense_answers: list[list[int]]
) -> None:
    prompts = random_prompts()
    document, questions = prompts[-1][:1500], [prompt[:40] for prompt in prompts[4:12]]
    asked = [document[: 1400 + 7 * index] + question for index, question in enumerate(questions)]
    dense = start_server(random_llama).generate_many(asked, TOKENS, at_once=1)
    sparse = start_server(random_llama, *SPARSE).generate_many(asked, TOKENS, at_once=4)
    assert [answer["output_ids"] for answer in sparse] == [answer["output_ids"] for answer in dense]
    assert sum(answer["meta_info"]["cached_tokens"] for answer in sparse) > 0


def test_decoding_200_tokens_crosses_page_borders(start_server: Any, random_llama: Path) -> None:
    prompt = random_prompts()[13]
    dense = start_server(random_llama).generate(prompt, 200)
    sparse = start_server(random_llama, *SPARSE).generate(prompt, 200)
    assert sparse["output_ids"] == dense["output_ids"]


def test_rule_all_reads_everything(start_server: Any, random_llama: Path) -> None:
    server = start_server(random_llama, *SPARSE)
    server.generate(random_prompts()[5], 4)
    info = server.sparse_info()
    assert info["kept_fraction"] == info["bytes_read_fraction"] == 1
    assert info["options"]["rule"] == "all"
