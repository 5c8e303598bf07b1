"""The baseline after SparDA: a server whose forecast chooses what is read says so, answers, and is dense when told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import write_random_model
from test_offload import prompts

from sglang_sparse.cpu import activate

pytestmark = pytest.mark.server

FLAGS = (
    *("--sparse-decode", "--sparse-decode-preset", "sparda", "--sparse-decode-top-k", "6"),
    *("--sparse-decode-min-context", "128", "--sparse-decode-window-tokens", "64", "--sparse-decode-block-size", "32"),
    *("--chunked-prefill-size", "256", "--sparse-decode-audit-rate", "0.5"),
)
TOKENS = 24
PROMPTS = prompts()[2:6]
"""Two on one prefix; three grow over the border of a page."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, of which two are forecast; normed heads."""
    folder = tmp_path_factory.mktemp("random-qwen3")
    return write_random_model(folder, architecture="Qwen3ForCausalLM", layers=3, tie_word_embeddings=False)


def dense_answers(folder: Path) -> list[list[int]]:
    """Of transformers."""
    activate()
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        out = model.generate(given, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS, eos_token_id=None)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def test_a_forecast_chooses_what_is_read(start_server: Any, model: Path) -> None:
    server = start_server(model, *FLAGS)

    def answers() -> list[list[int]]:
        return [each["output_ids"] for each in server.generate_many(PROMPTS, TOKENS, at_once=4)]

    few = answers()
    alone = server.generate(PROMPTS[1], TOKENS)
    assert alone["output_ids"] == few[1], "other requests and a cached prefix change nothing"
    assert alone["meta_info"]["cached_tokens"] > 0
    info = server.idle_info()
    assert info["options"]["select_by"] == "forecast"
    assert info["options"]["forecast"] == "query"
    assert 0.1 < info["kept_fraction"] < 0.6
    assert info["self_check"]["stale_pages"] == 0
    assert info["audit"]["samples"] > 0
    log = server.log.read_text()
    assert "reads what a forecast of the layer before chooses (--sparse-decode-select-by forecast; query, one v" in log
    assert "It changes the output." in log
    server.post("/sparse_decode", {"enabled": False}).raise_for_status()
    everything = answers()
    assert everything == dense_answers(model)
    assert few != everything, "six blocks are not enough for this model"
