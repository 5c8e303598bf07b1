"""A server that reads, a tokenizer of words, and samples that the tests share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import FakeServer, serving

from sglang_sparse.evaluate.__main__ import main

EXTRA = ("lm_eval", "datasets", "wonderwords", "nltk", "sacrebleu", "scipy", "tenacity", "matplotlib")
LENGTH = 900
SAMPLES = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in EXTRA if find_spec(name) is None]
    for item in items:
        if missing and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs the extra eval: {', '.join(missing)} missing"))


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with one token per word or punctuation mark."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="session")
def samples(word_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three samples of every task at 900 tokens."""
    path = tmp_path_factory.mktemp("samples") / "samples.json.gz"
    command = ["ruler", "--tokenizer", str(word_tokenizer), "--lengths", str(LENGTH), "--samples", str(SAMPLES)]
    assert main([*command, "--prepare", str(path)]) == 0
    return path


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake
