"""The query forecast is the next layer's query if the residual stream does not change in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import ARCHITECTURES, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, random_model

from sglang_sparse.forecast.errors import ForecastError
from sglang_sparse.forecast.model_parts import parts_of_transformers
from sglang_sparse.forecast.projection import Projection
from sglang_sparse.forecast.projections import folded_forecast, next_query, query_forecast

TOKENS = 5
GROUP = HEADS // KV_HEADS


def true_queries(model: Any, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotated queries `[T, Hq, D]` of a layer on the residual stream `hidden`, by the model's own code."""
    decoder = model.model.layers[layer]
    seen = []

    def attention(module: Any, query: torch.Tensor, key: Any, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen.append(query)
        return query.transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("sglang_sparse_test", attention)
    model.config._attn_implementation = "sglang_sparse_test"
    types = getattr(model.config, "layer_types", None)
    own = (types[layer],) if type(model).__name__.startswith("Gemma3") else ()
    embedding = model.model.rotary_emb(hidden, positions[None], *own)
    decoder.self_attn(
        decoder.input_layernorm(hidden), position_embeddings=embedding, attention_mask=None, past_key_values=None
    )
    return seen[0][0].transpose(0, 1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_fold_is_the_true_query_of_an_unchanged_stream(architecture: str) -> None:
    model = random_model(architecture)
    parts = parts_of_transformers(model, positions=200)
    forecast = query_forecast(parts)
    expected_layers = {1, 2} if architecture == "Gemma3ForCausalLM" else {1, 2, 3}
    assert set(forecast.projections) == expected_layers == {n for n in range(LAYERS) if n in forecast}
    hidden = torch.randn(1, TOKENS, HIDDEN)
    positions = torch.randint(0, 200, (TOKENS,))
    for layer in expected_layers:
        queries = true_queries(model, layer, hidden, positions)
        assert queries.shape == (TOKENS, HEADS, HEAD_DIM)
        grouped = queries.unflatten(1, (KV_HEADS, GROUP))
        x = model.model.layers[layer - 1].input_layernorm(hidden)[0]
        torch.testing.assert_close(forecast.vectors(layer, x, positions), grouped, rtol=1e-3, atol=1e-3)
        if parts.layers[layer].projection.head_norm is None:
            mean = folded_forecast(parts).vectors(layer, x, positions)
            torch.testing.assert_close(GROUP * mean, grouped.sum(2, keepdim=True), rtol=1e-3, atol=1e-3)
        # The norm of the layer before has been undone: without that the queries are others.
        unscaled = parts.layers[layer].projection(x)
        assert not torch.allclose(next_query(parts, layer)(x), unscaled, rtol=0.1, atol=0.1)


def test_bias_is_part_of_the_query() -> None:
    parts = parts_of_transformers(random_model("Qwen2ForCausalLM"), positions=8)
    made = query_forecast(parts).vectors(1, torch.zeros(1, HIDDEN), torch.tensor([0]))
    bias = parts.layers[1].projection.bias
    assert bias is not None
    torch.testing.assert_close(made[0], bias.view(KV_HEADS, GROUP, HEAD_DIM))


def test_channels_that_a_norm_scaled_away_are_not_blown_up() -> None:
    projection = Projection(torch.ones(HEAD_DIM, 3), None, HEAD_DIM)
    made = projection.after(torch.tensor([2.0, 2.0, 2.0]), torch.tensor([1.0, 1e-9, 0.0]))
    assert made.input_scale is not None
    assert made.input_scale.tolist() == [2.0, 0.0, 0.0]
    assert made.folded(1).weight[0].tolist() == [2.0, 0.0, 0.0]


def test_normed_heads_can_be_made_linear() -> None:
    parts = parts_of_transformers(random_model("Qwen3ForCausalLM"), positions=8)
    projection = parts.layers[1].projection
    x = torch.randn(1, HIDDEN).expand(4, -1)
    linear = projection.linearised(x)
    assert linear.head_norm is None
    torch.testing.assert_close(linear(x), projection(x))
    torch.testing.assert_close(linear(2 * x), 2 * projection(x))


def test_other_architectures_are_refused_by_name() -> None:
    model = random_model("LlamaForCausalLM", architectures=["GPT2LMHeadModel"])
    with pytest.raises(ForecastError, match="no forecasts for GPT2LMHeadModel: use --sparse-decode-forecast none"):
        parts_of_transformers(model, positions=8)


def test_quantised_projections_are_refused() -> None:
    model = random_model("LlamaForCausalLM")
    model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(
        torch.zeros(HEADS * HEAD_DIM, HIDDEN, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(ForecastError, match="is quantised"):
        parts_of_transformers(model, positions=8)


def test_identity_is_that_of_the_weights_whatever_their_type() -> None:
    model = random_model("LlamaForCausalLM").bfloat16()
    identity = parts_of_transformers(model, positions=8).identity()
    for dtype in (torch.float32, torch.float16):
        assert parts_of_transformers(model.to(dtype), positions=8).identity() == identity
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight[0, 0] += 1
    assert parts_of_transformers(model, positions=8).identity() != identity
