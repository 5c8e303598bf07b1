"""What the estimators make of keys like Qwen2's: large biases, which rotate with the position."""

from __future__ import annotations

import pytest
import torch
from random_model import write_random_model
from safetensors.torch import load_file, save_file

from sglang_sparse.calibrate.measure import Result, measure
from sglang_sparse.calibrate.prompts import Prompt
from sglang_sparse.calibrate.replay import Replay
from sglang_sparse.calibrate.settings import Setting
from sglang_sparse.options import SparseDecodeOptions

PROMPT = torch.randint(0, 256, (1500,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """A Qwen2 model whose key biases are far larger than what its keys say."""
    folder = write_random_model(tmp_path_factory.mktemp("biased"), architecture="Qwen2ForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            tensor *= 5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Replay(folder, device="cpu")


def result(replay: Replay, options: SparseDecodeOptions) -> Result:
    (made,) = measure(replay, [Prompt("p", "text", PROMPT[:-12], PROMPT[-12:])], [Setting(options)], 12)
    return made


def test_mean_variance_fails_on_biased_keys_and_the_default_does_not(biased: Replay) -> None:
    exact = result(biased, SparseDecodeOptions(estimator="exact"))
    default = result(biased, SparseDecodeOptions())
    mean_variance = result(biased, SparseDecodeOptions(estimator="mean-variance"))
    assert exact.coverage_p1 > 0.5
    assert default.coverage_p1 > exact.coverage_p1 - 0.1
    assert default.kl_mean < 0.05
    assert mean_variance.coverage_p1 < 0.5 * exact.coverage_p1
    assert mean_variance.kl_mean > 20 * default.kl_mean
