"""A running server's settings, for all requests over HTTP and for one request with `custom_params`."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

pytestmark = pytest.mark.server

ADMIN_KEY = "secret"
# Without prefix cache, an answer is the same each time; the template gives the random model a chat route.
SHARED = ("--disable-radix-cache", "--chunked-prefill-size", "256")
FLAGS = (
    *("--sparse-decode", "--sparse-decode-min-context", "128", "--sparse-decode-window-tokens", "32"),
    *("--sparse-decode-gamma", "0.6", "--sparse-decode-audit-rate", "0.5", "--page-size", "32"),
    *("--admin-api-key", ADMIN_KEY, "--chat-template", "chatml", *SHARED),
)
TOKENS = 16
STARTED = {"enabled": True, "gamma": None, "delta": None, "audit_rate": 0.5}
DEEP: list[tuple[Any, str]] = [
    ({"sparse_decode": {"gamma": 2}}, "custom_params.sparse_decode.gamma"),
    ({"sparse_decode": {"gamma": {"layer": 0.9}}}, "custom_params.sparse_decode.gamma"),
    ({"sparse_decode": {"delta": 5}}, "custom_params.sparse_decode.delta"),
    ({"sparse_decode": {"dense": "yes"}}, "custom_params.sparse_decode.dense"),
    ({"other": {"list": [1]}}, "custom_params.other.list"),
    ({"other": [[1]]}, "custom_params.other[0]"),
    ({"other": [{"a": 1}]}, "custom_params.other[0]"),
    ({"other": {"a": {"b": {"c": 1}}}}, "custom_params.other.a"),
]


def prompt(seed: int, length: int = 700) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


@pytest.fixture
def server(start_server: Any, random_llama: Path) -> Any:
    server = start_server(random_llama, *FLAGS)
    change(server, **STARTED)
    return server


@pytest.fixture
def dense(start_server: Any, random_llama: Path) -> Any:
    return start_server(random_llama, *SHARED)


def get(server: Any) -> dict[str, Any]:
    response = requests.get(f"{server.url}/sparse_decode", timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def post(server: Any, body: Any, key: str | None = ADMIN_KEY) -> requests.Response:
    data = body if isinstance(body, (str, bytes)) else json.dumps(body)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return requests.post(f"{server.url}/sparse_decode", data=data, headers=headers, timeout=60)


def change(server: Any, **changes: Any) -> dict[str, Any]:
    response = post(server, changes)
    assert response.status_code == 200, response.text
    return response.json()


def generate(server: Any, ids: list[int], tokens: int = TOKENS, **sparse_decode: Any) -> dict[str, Any]:
    custom = {"custom_params": {"sparse_decode": sparse_decode}} if sparse_decode else {}
    return server.generate(ids, tokens, **custom)


def read(answer: dict[str, Any]) -> float:
    return answer["meta_info"]["sparse_decode"]["kept_fraction"]


def events(response: requests.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# --- for all requests ------------------------------------------------------------------------------------------------


def test_options_settings_and_statistics_are_shown(server: Any) -> None:
    generate(server, prompt(1))
    state = get(server)
    assert state["options"]["gamma"] == 0.6
    assert state["control"] == STARTED
    assert 0 < state["kept_fraction"] < 1
    for table in (state["kept_fraction_by_layer_and_head"], state["since_change"]["kept_fraction_by_layer_and_head"]):
        assert [len(row) for row in table] == [2, 2]
        assert all(0 < share <= 1 for row in table for share in row)
    # Under overlap scheduling one more step is in flight when the request ends.
    assert TOKENS - 1 <= state["since_change"]["steps"] <= TOKENS
    assert server.sparse_info()["control"] == STARTED


@pytest.mark.parametrize("key", [None, "", "wrong"])
def test_changes_need_the_admin_key(server: Any, key: str | None) -> None:
    response = post(server, {"enabled": False}, key)
    assert response.status_code == 401
    assert get(server)["control"] == STARTED


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"delta": 1}, "delta"),
        ({"gamma": 1.5}, "gamma"),
        ({"gamma": "0.9"}, "gamma"),
        ({"audit_rate": 3}, "audit_rate"),
        ({"enabled": 0}, "enabled"),
        ({"enabled": False, "gamma": 0}, "gamma"),
        ({}, "gamma"),
        ([], "JSON object"),
        ("{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        ('{"gamma": 0.5, "gamma": 0.6}', "'gamma' is given twice"),
        ('{"gamma": NaN}', "gamma is NaN"),
        (f'{{"gamma": {"1" * 5000}}}', "not valid JSON"),
        ("", "not valid JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_change_is_refused_whole(server: Any, body: Any, named: str) -> None:
    response = post(server, body)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
    assert get(server)["control"] == STARTED


def test_switched_off_the_server_answers_densely_and_back_on_sparsely(server: Any, dense: Any) -> None:
    prompts = [prompt(seed, 300 + 200 * seed) for seed in range(4)]
    wanted = [generate(dense, ids)["output_ids"] for ids in prompts]
    sparse = [generate(server, ids) for ids in prompts]
    assert [answer["output_ids"] for answer in sparse] != wanted, "sparse answers that are dense ones"
    assert change(server, enabled=False)["control"]["enabled"] is False
    off = [generate(server, ids) for ids in prompts]
    assert [answer["output_ids"] for answer in off] == wanted
    assert [read(answer) for answer in off] == [1, 1, 1, 1]
    # A request's own gamma waits until sparse decode is on again.
    assert read(generate(server, prompts[0], gamma=0.3)) == 1
    assert get(server)["since_change"]["kept_fraction"] == 1
    change(server, enabled=True)
    assert [generate(server, ids)["output_ids"] for ids in prompts] == [answer["output_ids"] for answer in sparse]


def test_a_running_request_follows_from_the_next_step(server: Any) -> None:
    body = {
        "input_ids": prompt(20),
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True},
    }
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=300) as response:
        lines = (line for line in response.iter_lines() if line.startswith(b"data: {"))
        for _ in range(20):
            next(lines)
        change(server, enabled=False)
        state = get(server)
        while not state["since_change"]["steps"]:
            time.sleep(0.02)
            state = get(server)
        # Not one sparse step after the switch, though the request is the same.
        assert state["since_change"]["kept_fraction"] == 1
        last = json.loads(list(lines)[-1].removeprefix(b"data: "))
    assert get(server)["since_change"]["kept_fraction"] == 1
    assert last["meta_info"]["completion_tokens"] == 150
    assert 0.2 < read(last) < 1


def test_gamma_changes_what_is_read(server: Any) -> None:
    kept = {}
    for gamma in (0.3, 0.9, 1, None):
        change(server, gamma=gamma)
        kept[gamma] = read(generate(server, prompt(30)))
        # Alone on the server, a request reads what the server reads; but for a step in flight when it ends.
        assert get(server)["since_change"]["kept_fraction"] == pytest.approx(kept[gamma], abs=0.02)
    assert kept[0.3] < kept[None] < kept[0.9] < kept[1] == 1


def test_the_audit_rate_changes(server: Any) -> None:
    def samples(tokens: int) -> int:
        before = get(server)["audit"]["samples"]
        generate(server, prompt(40), tokens + 1)
        return get(server)["audit"]["samples"] - before

    change(server, audit_rate=1)
    assert samples(10) >= 9
    change(server, audit_rate=0)
    samples(1)
    assert samples(10) == 0
    change(server, audit_rate=1, enabled=False)
    samples(1)
    assert samples(10) == 0


# --- for one request -------------------------------------------------------------------------------------------------


def test_requests_of_one_batch_read_what_each_asks_for(server: Any, dense: Any) -> None:
    asked: list[dict[str, Any]] = [{"gamma": 0.3}, {}, {"gamma": 0.95}, {"dense": True}]
    ids = prompt(50, 900)
    start = threading.Barrier(len(asked))

    def send(settings: dict[str, Any]) -> dict[str, Any]:
        start.wait()
        return generate(server, ids, 40, **settings)

    before = get(server)
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(send, asked))
    steps = get(server)["steps"] - before["steps"]
    assert steps < 3 * 39, "the requests did not run in one batch"
    kept = [read(answer) for answer in together]
    assert kept == sorted(kept)
    assert len(set(kept)) == 4
    assert kept[3] == 1
    assert together[3]["output_ids"] == generate(dense, ids, 40)["output_ids"]
    # What the server does with others is as before.
    assert get(server)["control"] == STARTED
    assert read(generate(server, ids, 40)) == pytest.approx(kept[1], abs=0.05)


def test_a_batch_in_one_body_takes_params_for_each(server: Any) -> None:
    sampling = [
        {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "custom_params": custom}
        for custom in ({"sparse_decode": {"dense": True}}, None, {"sparse_decode": {"gamma": 0.3}, "mine": [1, "a"]})
    ]
    response = server.post("/generate", {"input_ids": [prompt(60)] * 3, "sampling_params": sampling})
    assert response.status_code == 200, response.text
    kept = [read(answer) for answer in response.json()]
    assert kept[0] == 1 > kept[1] > kept[2]
    sampling[1]["custom_params"] = {"deep": {"er": [1]}}
    response = server.post("/generate", {"input_ids": [prompt(60)] * 3, "sampling_params": sampling})
    assert response.status_code == 400
    assert "custom_params.deep.er" in response.text


def bodies(custom_params: Any, **more: Any) -> dict[str, dict[str, Any]]:
    openai = {"model": "default", "max_tokens": 4, "custom_params": custom_params, **more}
    return {
        "/generate": {
            "text": "hello",
            "sampling_params": {"max_new_tokens": 4, "custom_params": custom_params},
            **more,
        },
        "/v1/completions": {"prompt": "hello", **openai},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], **openai},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("params", "field"), DEEP, ids=[json.dumps(params) for params, _ in DEEP])
def test_wrong_params_are_http_400_on_every_route_and_the_server_lives(
    server: Any, params: Any, field: str, stream: bool
) -> None:
    for path, body in bodies(params, stream=stream).items():
        response = server.post(path, body)
        assert response.status_code == 400, (path, response.text)
        assert field in response.text, path
    assert len(generate(server, prompt(70, 10), 2)["output_ids"]) == 2
    assert server.process.poll() is None


def test_params_that_are_no_object_are_http_400(server: Any) -> None:
    for path, body in bodies([1]).items():
        response = server.post(path, body)
        assert response.status_code == 400, (path, response.text)
        assert "custom_params" in response.text


def test_streams_of_generate_end_with_what_was_read(server: Any) -> None:
    body = {
        "input_ids": prompt(80),
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
    }
    chunks = [event["meta_info"] for event in events(server.post("/generate", body))]
    assert ["sparse_decode" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["sparse_decode"] == generate(server, prompt(80))["meta_info"]["sparse_decode"]


def test_openai_routes_say_what_was_read(server: Any) -> None:
    text = "".join(chr(97 + token % 26) for token in prompt(90, 400))
    shared = {"model": "default", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    for path, content in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        for params, dense in (({"gamma": 0.3}, False), ({"dense": True}, True)):
            body = {**shared, **content, "custom_params": {"sparse_decode": params}}
            options = {"stream": True, "stream_options": {"include_usage": True}}
            streamed = events(server.post(path, {**body, **options}))
            assert all("sparse_decode" not in json.dumps(event) for event in streamed[:-1])
            usage = streamed[-1]["usage"]
            assert usage["completion_tokens"] == 8
            assert (usage["sparse_decode"]["kept_fraction"] == 1) == dense
            if "chat" in path:
                whole = server.post(path, {**body, "return_meta_info": True}).json()
                found = whole["choices"][0]["meta_info"]["sparse_decode"]
            else:
                whole = server.post(path, body).json()
                assert whole["choices"][0]["text"]
                found = whole["usage"]["sparse_decode"]
            assert found == usage["sparse_decode"]


def test_several_choices_are_summed(server: Any) -> None:
    body = {
        "model": "default",
        "prompt": prompt(100),
        "max_tokens": 6,
        "ignore_eos": True,
        "n": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage = events(server.post("/v1/completions", body))[-1]["usage"]["sparse_decode"]
    # Five decode steps each, from 701 tokens on: 44 blocks, in two layers of two KV heads.
    assert usage["blocks"] == 3 * (4 * 44 * 4 + 45 * 4)
    assert usage["kept_fraction"] == usage["kept_blocks"] / usage["blocks"]


@pytest.mark.parametrize("beside", [False, True])
def test_selection_begins_with_the_minimum_context(server: Any, beside: bool) -> None:
    options, layers, kv_heads = get(server)["options"], 2, 2
    block, page, sink, window = 16, 32, options["sink_tokens"], options["window_tokens"]

    def read(tokens: int) -> int:
        """Blocks that a step reads in a row: those that are always read, from the minimum context on."""
        blocks = range(-(-tokens // block))
        if tokens < options["min_context"]:
            return len(blocks)
        first = min(tokens - window, tokens // page * page)
        return sum(b * block < sink or (b + 1) * block > first for b in blocks)

    # A batch in which no request selects is decoded in another way than one in which another request does.
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(generate, server, prompt(120), 200) if beside else None
        found = generate(server, prompt(121, 115), 30, gamma=1e-6)["meta_info"]["sparse_decode"]
    assert found["kept_blocks"] == layers * kv_heads * sum(read(tokens) for tokens in range(116, 145))
    assert found["kept_fraction"] < 1
    if other:
        assert other.result()["meta_info"]["sparse_decode"]["kept_fraction"] < 1


def test_a_request_without_decode_steps_says_nothing(server: Any) -> None:
    assert "sparse_decode" not in generate(server, prompt(110), 1)["meta_info"]
