"""Whatever a config file or a command line holds, it gives options or one line that says what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sparse import option_sources
from sglang_sparse.option_values import OptionsError
from sglang_sparse.options import SparseDecodeOptions

DEFAULTS = json.loads(SparseDecodeOptions().to_json())
NAMES = sorted(DEFAULTS)
TEXT = st.text(st.characters(exclude_categories=[]), max_size=10)
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, 4, 16, 64, 0.5, 10**400, 2**31])
WORDS = st.sampled_from(
    [
        *("thumbnail", "exact", "minmax", "coverage", "top-k", "top-delta", "mean", "drop", "fused", "0,1", "0-3"),
        *("0.9,0.8", "split", "fp8_e4m3", "query", "average", "every", "1GiB", "0.5", "-1", "nan", "inf", ""),
    ]
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT | WORDS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2))
CONFIGS = st.dictionaries(st.sampled_from(NAMES) | TEXT, VALUES, max_size=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "sparse.json"


def one_line(error: BaseException) -> str:
    message = str(error)
    assert message.strip()
    assert len(message.splitlines()) == 1, message
    return message


def assert_options_or_one_line(given_values: dict[str, Any]) -> None:
    try:
        options = option_sources.merge(given_values)
    except OptionsError as error:
        one_line(error)
        return
    # What was taken can be carried to other processes.
    assert SparseDecodeOptions.from_mapping(json.loads(options.to_json())) == options


@given(st.binary() | CONFIGS.map(lambda config: json.dumps(config).encode()) | VALUES.map(json.dumps).map(str.encode))
def test_config_files_are_read_or_refused_in_one_line(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert_options_or_one_line({"config": str(path)})


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
def test_options_from_python_are_taken_or_refused_in_one_line(values: dict[str, Any]) -> None:
    assert_options_or_one_line(values)


@pytest.mark.parametrize("content", [b"[" * 10**5, b'{"gamma":' * 10**5, b'{"gamma": ' + b"1" * 10**5 + b"}"])
def test_nesting_and_digits_without_end_are_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(OptionsError, match="not valid JSON"):
        option_sources.merge({"config": str(path)})


@pytest.mark.parametrize("name", ["", ".", "no\0name", "no/such/file", "a" * 5000, "\ud800"])
def test_names_that_are_no_files_are_refused(name: str) -> None:
    with pytest.raises(OptionsError, match="--sparse-decode-config"):
        option_sources.merge({"config": name})


def parser() -> tuple[argparse.ArgumentParser, list[str]]:
    made = argparse.ArgumentParser()
    option_sources.add_flags(made)
    flags = [text for action in made._actions for text in action.option_strings if text.startswith("--sparse")]
    return made, flags


PARSER, FLAGS = parser()


@given(st.lists(st.tuples(st.sampled_from(FLAGS), st.none() | WORDS | TEXT | NUMBERS.map(str)), max_size=4))
def test_command_lines_are_taken_or_refused(asked: list[tuple[str, str | None]]) -> None:
    words = ["--sparse-decode"]
    for name, value in asked:
        words += [name] if value is None else [name, value]
    errors, code = io.StringIO(), None
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            namespace = PARSER.parse_args(words)
    except SystemExit as stop:
        code = stop.code
    if code is not None:
        assert code == 2
        assert "error: " in errors.getvalue()
        return
    try:
        options = option_sources.pop_flags(namespace)
    except OptionsError as error:
        one_line(error)
        return
    assert options is not None
    assert not vars(namespace)
