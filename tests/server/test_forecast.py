"""A server says the same whatever its forecast names, and says at start why it does not take a file of heads."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KV_ITEM_BYTES, assert_same_answers, command, environment, skip_unless_served
from random_model import write_random_model
from test_offload import FLAGS as OFFLOAD_FLAGS
from test_offload import OFFLOAD, prompts

from sglang_sparse.calibrate.model import load_model
from sglang_sparse.forecast.heads_file import write_heads
from sglang_sparse.forecast.model_parts import ModelParts, parts_of_transformers

pytestmark = pytest.mark.server

FLAGS = (*OFFLOAD_FLAGS, "--sparse-decode-gamma", "0.4")
"""Steps that choose so few blocks that slots are idle, which a prefetch may take."""

FEW_SLOTS = ("--sparse-decode-hot-cache", f"{0.0096 * KV_ITEM_BYTES:.4f}GiB")
FORECAST = "--sparse-decode-forecast"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, of which two are forecast; normed heads, so large that what steps lack is worth a score on a GPU
    too. Made in bfloat16, so that its hash is the same in all dtypes that servers use."""
    folder = tmp_path_factory.mktemp("random-qwen3")
    sizes = {"layers": 3, "heads": 16, "kv_heads": 8, "head_dim": 128}
    return write_random_model(folder, architecture="Qwen3ForCausalLM", bfloat16=True, **sizes)


def parts_of(folder: Path) -> ModelParts:
    return parts_of_transformers(load_model(folder, lambda *_: None, device="cpu", dtype=torch.float32), positions=8)


def write_noise(path: Path, model: Path, factor: float = 1.0) -> None:
    """Heads that know nothing."""
    parts = parts_of(model)
    shape = (parts.kv_heads * parts.head_dim, parts.hidden_size)
    generator = torch.Generator().manual_seed(1)
    heads = {layer: (torch.randn(shape, generator=generator) * factor, None) for layer in parts.forecastable()}
    write_heads(path, heads, parts.identity())


@pytest.fixture(scope="module")
def noise(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "noise.safetensors"
    write_noise(path, model)
    return path


@pytest.fixture(scope="module")
def resident_answers(start_server: Any, model: Path) -> list[dict[str, Any]]:
    server = start_server(model, *FLAGS)
    return server.generate_many(prompts(), tokens=40, at_once=8, margins=True)


@pytest.mark.parametrize("forecast", ["none", "query", "noise"])
def test_same_tokens_with_any_forecast(
    forecast: str, start_server: Any, model: Path, noise: Path, resident_answers: list[dict[str, Any]]
) -> None:
    # `query` is the default.
    flags = {"query": (), "none": (FORECAST, "none"), "noise": (FORECAST, str(noise))}[forecast]
    server = start_server(model, *FLAGS, *OFFLOAD, *FEW_SLOTS, *flags)
    server.generate(prompts()[3], 4)
    answers = server.generate_many(prompts(), tokens=40, at_once=8)
    assert_same_answers(answers, resident_answers)
    info = server.idle_info()
    offload, check = info["offload"], info["self_check"]
    assert check["stale_pages"] == check["wrong_slots"] == 0
    assert offload["misses"] > 0
    assert info["options"]["forecast"] == {"noise": str(noise)}.get(forecast, forecast)
    shown = offload["forecast"]
    if forecast == "none":
        assert shown is None
        return
    assert shown["forecast"] == ("query" if forecast == "query" else "heads")
    assert shown["prefetched_bytes"] == shown["used_bytes"] + shown["wasted_bytes"] > 0
    assert min(shown["used_bytes"], shown["wasted_bytes"]) > 0
    assert shown["hidden_share"] == shown["used_bytes"] / (shown["used_bytes"] + offload["missed_bytes"])


@pytest.mark.parametrize("fault", ["of another model", "not finite"])
def test_heads_that_do_not_fit_are_refused_at_start(
    fault: str, random_llama: Path, model: Path, noise: Path, tmp_path: Path
) -> None:
    skip_unless_served(OFFLOAD)
    if fault == "of another model":
        served, given = random_llama, noise
        message = "was trained for another model, of architecture Qwen3ForCausalLM and not Llama"
    else:
        served, given = model, tmp_path / "nan.safetensors"
        write_noise(given, model, float("nan"))
        message = "layers.1.weight has numbers that are not finite: train the heads anew"
    done = subprocess.run(
        command(served, *FLAGS, *OFFLOAD, FORECAST, str(given)),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=240,
        check=False,
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("sglang-sparse: error: ")]
    assert len(lines) == 1, done.stderr[-3000:]
    assert f"{FORECAST} {given}: {message}" in lines[0]
