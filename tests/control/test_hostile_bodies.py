"""Whatever is sent to `/sparse_decode`, or as `custom_params` of `/generate`, is taken or answered with HTTP 400."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from sglang_sparse.control.http import PATH, add_routes, check_before_streams
from sglang_sparse.control.values import Change
from sglang_sparse.options import SparseDecodeOptions

NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 0.5, 10**400, 2**31, 1e308, -0.0])
TEXT = st.text(st.characters(exclude_categories=[]), max_size=12)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
KEYS = st.sampled_from(["gamma", "delta", "enabled", "audit_rate", "dense", "sparse_decode"]) | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4))
STARTED = [
    SparseDecodeOptions(),
    SparseDecodeOptions(audit_rate=0),
    SparseDecodeOptions(gamma=1),
    SparseDecodeOptions(rule="top-delta"),
    SparseDecodeOptions(rule="top-k", top_k=0.2),
]


class Generate(BaseModel):
    """As much of SGLang's GenerateReqInput as the check looks at."""

    sampling_params: Any = None


def application(options: SparseDecodeOptions) -> tuple[FastAPI, list[Mapping[str, Change]]]:
    app, changes = FastAPI(), []

    async def exchange(asked: Mapping[str, Change]) -> dict[str, Any]:
        changes.append(asked)
        return {}

    @app.post("/generate")
    async def generate(obj: Generate, request: Request) -> dict[str, Any]:
        return {}

    add_routes(app, options, exchange)
    check_before_streams(app, "/generate", options)
    return app, changes


APPLICATIONS = [application(options) for options in STARTED]


def post(app: FastAPI, path: str, body: bytes) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(path, content=body, headers={"content-type": "application/json"})

    return asyncio.run(send())


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def assert_refused_in_one_line(response: httpx.Response) -> None:
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.strip()
    assert "\n" not in message


@given(st.sampled_from(APPLICATIONS), st.binary() | JSON.map(encoded) | st.dictionaries(KEYS, SCALARS).map(encoded))
def test_changes_are_taken_or_refused(served: tuple[FastAPI, list[Mapping[str, Change]]], body: bytes) -> None:
    app, changes = served
    changes.clear()
    response = post(app, PATH, body)
    if response.status_code != 200:
        assert_refused_in_one_line(response)
        assert not changes, "part of it was taken"
        return
    (taken,) = changes
    assert taken
    for name, value in taken.items():
        if name == "enabled":
            assert isinstance(value, bool)
        else:
            assert value is None or (type(value) is float and 0 <= value <= 2**31)


def test_nesting_without_end_is_refused() -> None:
    for app, _ in APPLICATIONS:
        for body in (b"[" * 10**5, b'{"gamma":' * 10**5, b'{"gamma": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"):
            assert_refused_in_one_line(post(app, PATH, body))


@given(st.sampled_from(APPLICATIONS), JSON | st.fixed_dictionaries({"sparse_decode": JSON}), st.booleans())
def test_params_of_requests_are_taken_or_refused(served: tuple[FastAPI, Any], custom: Any, several: bool) -> None:
    params: Any = {"custom_params": custom}
    response = post(served[0], "/generate", encoded({"sampling_params": [params, params] if several else params}))
    if response.status_code not in (200, 422):  # 422: FastAPI finds no JSON in it
        assert_refused_in_one_line(response)
        assert "custom_params" in response.text
