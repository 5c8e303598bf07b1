"""A file of heads gives back what was written, and is refused in one line if it does not fit the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import HEAD_DIM, HIDDEN, KV_HEADS, random_model
from safetensors.torch import save_file

from sglang_sparse.forecast.choice import make_forecast
from sglang_sparse.forecast.errors import ForecastError
from sglang_sparse.forecast.heads_file import Heads, write_heads
from sglang_sparse.forecast.model_parts import ModelParts, parts_of_transformers
from sglang_sparse.forecast.projections import folded_forecast, heads_forecast

FLAG = "--sparse-decode-forecast"
ROWS = KV_HEADS * HEAD_DIM


def parts_of(seed: int = 0, architecture: str = "Qwen2ForCausalLM") -> ModelParts:
    return parts_of_transformers(random_model(architecture, seed), positions=32)


@pytest.fixture(scope="module")
def parts() -> ModelParts:
    return parts_of()


def folded(parts: ModelParts) -> Heads:
    made = folded_forecast(parts).projections
    return {layer: (projection.weight, projection.bias) for layer, projection in made.items()}


def test_heads_come_back_as_they_were_written(parts: ModelParts, tmp_path: Path) -> None:
    path = tmp_path / "heads.safetensors"
    heads = folded(parts)
    write_heads(path, heads, parts.identity())
    made = make_forecast(str(path), parts, FLAG)
    assert made is not None
    assert made.bytes == sum(w.nbytes + b.nbytes for w, b in heads.values() if b is not None)
    x, positions = torch.randn(3, HIDDEN), torch.tensor([0, 7, 31])
    for layer in heads:
        expected = folded_forecast(parts).vectors(layer, x, positions)
        torch.testing.assert_close(made.vectors(layer, x, positions), expected)
        assert torch.equal(heads_forecast(parts, heads).vectors(layer, x, positions), expected)


def test_a_vector_for_each_query_head_is_possible(parts: ModelParts, tmp_path: Path) -> None:
    path = tmp_path / "heads.safetensors"
    heads = {layer: (parts.layers[layer].projection.weight, None) for layer in (1, 2, 3)}
    write_heads(path, heads, parts.identity())
    made = make_forecast(str(path), parts, FLAG)
    assert made is not None
    assert made.per_head == 3
    assert made.vectors(1, torch.randn(2, HIDDEN), torch.zeros(2, dtype=torch.long)).shape == (2, KV_HEADS, 3, HEAD_DIM)


def test_none_and_query_need_no_file(parts: ModelParts) -> None:
    assert make_forecast("none", parts, FLAG) is None
    made = make_forecast("query", parts, FLAG)
    assert made is not None
    assert 0 not in made
    assert all(layer in made for layer in (1, 2, 3))


def refusal(path: Path, parts: ModelParts) -> str:
    with pytest.raises(ForecastError) as caught:
        make_forecast(str(path), parts, FLAG)
    message = str(caught.value)
    assert message.startswith(f"{FLAG} {path}: ")
    assert "\n" not in message
    return message


def test_heads_of_another_model_are_refused(parts: ModelParts, tmp_path: Path) -> None:
    path = tmp_path / "heads.safetensors"
    write_heads(path, folded(parts), parts.identity())
    assert "was trained for another model, of q_hash " in refusal(path, parts_of(seed=1))
    assert "of architecture Qwen2ForCausalLM and not LlamaForCausa" in refusal(path, parts_of(0, "LlamaForCausalLM"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda heads: heads.update({layer: (torch.zeros(2 * ROWS, HIDDEN), None) for layer in heads}),
            f"layers.1.weight is [{2 * ROWS}, {HIDDEN}] float32, expected [{ROWS}, {HIDDEN}] of floats",
        ),
        (lambda heads: heads.pop(2), "lacks layers.2.weight"),
        (lambda heads: heads.update({9: (heads[1][0].clone(), None)}), "has an unknown tensor layers.9.weight"),
        (
            lambda heads: heads.update({1: (torch.zeros(ROWS, HIDDEN + 1), None)}),
            f"layers.1.weight is [{ROWS}, {HIDDEN + 1}] float32, expected [{ROWS}, {HIDDEN}] of floats",
        ),
        (
            lambda heads: heads.update({3: (heads[3][0], torch.zeros(1))}),
            f"layers.3.bias is [1] float32, expected [{ROWS}]",
        ),
        (
            lambda heads: heads.update({1: (torch.zeros(ROWS, HIDDEN, dtype=torch.int8), None)}),
            f"layers.1.weight is [{ROWS}, {HIDDEN}] int8",
        ),
        (
            lambda heads: heads.update({3: (heads[3][0], torch.full((ROWS,), float("nan")))}),
            "layers.3.bias has numbers that are not finite",
        ),
    ],
)
def test_wrong_tensors_are_refused(change, message: str, parts: ModelParts, tmp_path: Path) -> None:
    heads = folded(parts)
    change(heads)
    path = tmp_path / "heads.safetensors"
    write_heads(path, heads, parts.identity())
    assert message in refusal(path, parts)


def test_files_of_other_kinds_are_refused(parts: ModelParts, tmp_path: Path) -> None:
    path = tmp_path / "heads.safetensors"
    assert "there is no such file: give none, query, or a file" in refusal(path, parts)
    path.write_bytes(b"weights")
    assert "not a safetensors file" in refusal(path, parts)
    for metadata in ({}, {"forecast": "3"}, {"forecast": '{"format": "other"}'}):
        save_file({"a": torch.zeros(1)}, path, metadata=metadata)
        assert "holds no forecast heads: make some with python -m" in refusal(path, parts)
    save_file({"a": torch.zeros(1)}, path, metadata={"forecast": "{"})
    assert "not a safetensors file of heads" in refusal(path, parts)
