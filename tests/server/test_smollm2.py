"""A trained model: rule `all` equals dense, and the default settings find what dense finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.server

FACTS = {
    "Amber": "4821",
    "Birch": "7350",
    "Cedar": "1968",
    "Delta": "5517",
    "Ember": "3094",
    "Fjord": "8642",
    "Grove": "2276",
    "Haven": "6139",
    "Inlet": "9405",
    "Juniper": "1783",
}


def document(tokens: int) -> str:
    """English text of about `tokens` tokens with the facts planted at even depths."""
    filler = [
        "The morning was calm and the harbour lay still under a pale sky.",
        "Workers carried crates along the pier while gulls circled above.",
        "A letter arrived from the city with news of the coming season.",
        "In the afternoon the wind turned and small waves broke on the stones.",
        "Children played by the old wall until the bells rang for supper.",
        "The ledger on the desk listed every shipment of the past year.",
    ]
    sentences = [filler[i % len(filler)] for i in range(tokens // 14)]
    for index, (name, code) in enumerate(FACTS.items()):
        sentences.insert(round((index + 0.5) / len(FACTS) * len(sentences)), f"The access code of {name} is {code}.")
    return " ".join(sentences)


def question(name: str) -> str:
    return f"{document(2800)}\n\nThe access code of {name} is"


SPARSE = ("--sparse-decode", "--sparse-decode-min-context", "512")


def test_rule_all_equals_dense_on_smollm2(start_server: Any, smollm2: Path) -> None:
    text = document(2000)
    prompts = [text[:length] for length in (40, 400, 1500, 3000, 5000, 8000)]
    dense, sparse = start_server(smollm2), start_server(smollm2, *SPARSE, "--sparse-decode-rule", "all")
    for prompt in prompts:
        expected, got = dense.generate(prompt, 16), sparse.generate(prompt, 16)
        assert got["text"] == expected["text"]
        assert got["output_ids"] == expected["output_ids"]


def test_planted_facts_are_found_where_dense_finds_them(start_server: Any, smollm2: Path) -> None:
    # Less than the default asks for.
    dense, sparse = start_server(smollm2), start_server(smollm2, *SPARSE, "--sparse-decode-gamma", "0.95")
    found = {}
    for name, code in FACTS.items():
        found[name] = tuple(code in server.generate(question(name), 8)["text"] for server in (dense, sparse))
    dense_found = [name for name, (in_dense, _) in found.items() if in_dense]
    assert len(dense_found) >= 3, f"dense finds too little for the test to say anything: {found}"
    assert all(found[name][1] for name in dense_found), found
    info = sparse.sparse_info()
    assert info["kept_fraction"] < 0.6
    assert info["self_check"]["stale_pages"] == 0
