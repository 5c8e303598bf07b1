"""A file of heads that was changed, cut or is none is read, or refused in one line that begins with the flag."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import random_model
from safetensors.torch import save_file

from sglang_sparse.forecast.errors import ForecastError
from sglang_sparse.forecast.heads_file import METADATA, read_heads, write_heads
from sglang_sparse.forecast.model_parts import ModelParts, parts_of_transformers
from sglang_sparse.forecast.projections import folded_forecast
from sglang_sparse.forecast.training_data import read_texts

FLAG = "--sparse-decode-forecast"
DEEP = "[" * 10**5


@pytest.fixture(scope="module")
def parts() -> ModelParts:
    return parts_of_transformers(random_model("Qwen2ForCausalLM", 0), positions=32)


@pytest.fixture(scope="module")
def written(parts: ModelParts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "heads.safetensors"
    made = folded_forecast(parts).projections
    heads = {layer: (projection.weight, projection.bias) for layer, projection in made.items()}
    write_heads(path, heads, parts.identity())
    return path


def assert_one_line(error: ForecastError) -> None:
    assert str(error).startswith(FLAG)
    assert len(str(error).splitlines()) == 1


def assert_read_or_refused(path: Path, parts: ModelParts) -> None:
    try:
        heads = read_heads(path, parts, FLAG)
    except ForecastError as error:
        assert_one_line(error)
        return
    assert all(torch.isfinite(weight.float()).all() for weight, _ in heads.values())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_damaged_files_are_read_or_refused(
    parts: ModelParts, written: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(written.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        # The header is at the start, and most of what can go wrong.
        position = data.draw(st.integers(0, min(len(content), 1200) - 1) | st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    path = tmp_path / "heads.safetensors"
    path.write_bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
    assert_read_or_refused(path, parts)


@given(st.binary(max_size=200))
def test_other_files_are_refused(parts: ModelParts, tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "other.safetensors"
    path.write_bytes(content)
    with pytest.raises(ForecastError, match=FLAG):
        read_heads(path, parts, FLAG)


@pytest.mark.parametrize("about", [DEEP, "1" * 5000, "null", "[]", '{"format": []}', ""])
def test_what_a_file_says_of_itself_may_be_anything(parts: ModelParts, tmp_path: Path, about: str) -> None:
    path = tmp_path / "heads.safetensors"
    save_file({"layers.1.weight": torch.zeros(2, 2)}, path, metadata={METADATA: about})
    with pytest.raises(ForecastError, match=FLAG):
        read_heads(path, parts, FLAG)


@pytest.mark.parametrize("line", [DEEP, "1" * 5000, json.dumps({"text": 1}), '{"text": "a"', "\x00"])
def test_lines_of_training_data_are_refused_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(ForecastError, match=r"--data .*, line 2"):
        read_texts(path)
