"""RULER against a server that reads: samples, answers and scores are lm-eval's own."""

from __future__ import annotations

import gzip
import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import LENGTH, SAMPLES
from fake_server import MODEL, FakeServer

from sglang_sparse.evaluate.__main__ import main
from sglang_sparse.evaluate.lm_eval_parts import without_downloads
from sglang_sparse.evaluate.ruler_generators import TASKS

WITHOUT_NETWORK = """
import runpy, socket, sys
def refuse(*arguments, **options):
    raise AssertionError(f"reaches for the network: {arguments}")
socket.getaddrinfo = socket.create_connection = socket.socket.connect = socket.socket.connect_ex = refuse
sys.argv = ["evaluate", *sys.argv[1:]]
runpy.run_module("sglang_sparse.evaluate", run_name="__main__")
"""

LIGHT = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("datasets", "pyarrow", "pandas", "nltk", "wonderwords", "sacrebleu", "scipy"):
            raise ModuleNotFoundError(f"No module named {name}", name=name)
sys.meta_path.insert(0, Refuse())
sys.argv = ["evaluate", *sys.argv[1:]]
runpy.run_module("sglang_sparse.evaluate", run_name="__main__")
"""


def content(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def run(server: FakeServer, samples: Path, out: Path) -> Any:
    command = ["ruler", "--base-url", server.url, "--samples-from", str(samples), "--out", str(out)]
    assert main([*command, "--concurrency", "4"]) == 0
    return content(out)


def test_a_perfect_reader_scores_one(server: FakeServer, samples: Path, tmp_path: Path) -> None:
    result = run(server, samples, tmp_path / "out.json")
    assert [(row["task"], row["length"]) for row in result["results"]] == [(task, LENGTH) for task in TASKS]
    assert {row["task"]: row["score"] for row in result["results"]} == dict.fromkeys(TASKS, 1.0)
    assert {row["samples"] for row in result["results"]} == {SAMPLES}
    assert result["model"] == MODEL
    assert result["server"]["sparse_decode"] == [{"kept_fraction": 0.25}]
    assert len({sample["id"] for sample in result["samples"]}) == len(TASKS) * SAMPLES
    assert all(sample["answer"].strip() for sample in result["samples"])
    # One request to try, then each prompt once, greedy, with the task's own limit.
    sent = server.requests[1:]
    assert Counter(body["prompt"] for body in sent) == Counter(s["prompt"] for s in content(samples)["samples"])
    assert {body["temperature"] for body in sent} == {0.0}
    assert Counter(body["max_tokens"] for body in sent) == {128: 3 * SAMPLES, 30: SAMPLES, 120: SAMPLES, 50: SAMPLES}


def test_wrong_answers_are_seen_and_partial_ones_count_in_part(
    server: FakeServer, samples: Path, tmp_path: Path
) -> None:
    wrong = {s["prompt"] for s in content(samples)["samples"] if s["task"] == "niah_multikey_3"}
    words = content(samples)["samples"][-1]["doc"]["outputs"]

    def reply(prompt: str) -> dict[str, Any]:
        if prompt in wrong:
            return {"text": " 00000000"}
        return {"text": f" {words[0]} and others"} if prompt.endswith("appeared words are:") else {}

    server.reply = reply
    scores = {row["task"]: row["score"] for row in run(server, samples, tmp_path / "out.json")["results"]}
    assert scores["niah_multikey_3"] == 0.0
    assert 0.0 < scores["ruler_fwe"] <= 1 / 3
    assert all(scores[task] == 1.0 for task in TASKS if task not in ("niah_multikey_3", "ruler_fwe"))


def test_the_same_samples_come_again_without_a_network_in_another_order(
    word_tokenizer: Path, samples: Path, tmp_path: Path
) -> None:
    path = tmp_path / "again.json"
    command = ["ruler", "--tokenizer", str(word_tokenizer), "--lengths", str(LENGTH), "--samples", str(SAMPLES)]
    command += ["--prepare", str(path), "--tasks", *reversed(TASKS)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = content(samples), content(path)
    key = lambda sample: (TASKS.index(sample["task"]), sample["doc"]["index"])  # noqa: E731
    assert sorted(second["samples"], key=key) == first["samples"]
    assert second["tasks"] == first["tasks"]
    assert second["tokenizer"] == first["tokenizer"]


def test_a_run_with_samples_needs_no_datasets(server: FakeServer, samples: Path, tmp_path: Path) -> None:
    command = ["ruler", "--base-url", server.url, "--samples-from", str(samples), "--out", str(tmp_path / "out.json")]
    done = subprocess.run([sys.executable, "-c", LIGHT, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(row["score"] == 1.0 for row in content(tmp_path / "out.json")["results"])


@pytest.mark.parametrize("task", ["niah_multikey_2", "ruler_vt", "ruler_cwe"])
def test_samples_requests_and_scores_are_those_of_simple_evaluate(
    task: str, server: FakeServer, samples: Path, word_tokenizer: Path, tmp_path: Path
) -> None:
    server.reply = lambda prompt: {"text": right} if (right := wrong.get(prompt)) else {}
    ours = [sample for sample in content(samples)["samples"] if sample["task"] == task]
    wrong = {ours[1]["prompt"]: " " + ours[1]["doc"]["outputs"][0][:-1]}
    scores = {s["id"]: s["score"] for s in run(server, samples, tmp_path / "out.json")["samples"]}
    requests = [body for body in server.requests[1:] if body["prompt"] in {s["prompt"] for s in ours}]
    server.requests.clear()

    import lm_eval
    from lm_eval.tasks import TaskManager

    # As in a new process: some of its generators advance from call to call.
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ruler.")]:
        del sys.modules[name]
    with without_downloads():
        importlib.import_module("lm_eval.tasks.ruler.prepare_niah")
    metadata = {"tokenizer": str(word_tokenizer), "max_seq_lengths": [LENGTH]}
    folder = str(Path(lm_eval.__file__).parent / "tasks" / "ruler")
    theirs = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{server.url}/v1/completions",
            "model": MODEL,
            "tokenizer_backend": "None",
            "num_concurrent": 4,
        },
        tasks=[task],
        limit=SAMPLES,
        task_manager=TaskManager(include_path=folder, include_defaults=False, metadata=metadata),
        bootstrap_iters=0,
    )
    logged = theirs["samples"][task]
    assert {entry["doc_hash"]: entry[str(LENGTH)] for entry in logged} == {s["id"]: scores[s["id"]] for s in ours}
    assert [entry["arguments"][0][0] for entry in logged] == [s["prompt"] for s in ours]
    sort = lambda body: body["prompt"]  # noqa: E731
    assert sorted(server.requests, key=sort) == sorted(requests, key=sort)
