"""`/sparse_decode` on SGLang's HTTP server, and a check of `/generate` before a stream begins.

`GET` shows options, current settings and statistics. `POST` changes settings; it takes the admin API key if there is
one, else the API key if there is one, as SGLang's own control routes do.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import ORJSONResponse, Response
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_sparse.control.request import check_custom_params
from sglang_sparse.control.values import Change, check_changes
from sglang_sparse.option_values import OptionsError, parse_json
from sglang_sparse.options import SparseDecodeOptions

PATH = "/sparse_decode"

Exchange = Callable[[Mapping[str, Change]], Awaitable[dict[str, Any]]]


def add_routes(app: FastAPI, options: SparseDecodeOptions, exchange: Exchange) -> None:
    """Adds `GET` and `POST /sparse_decode`.

    Args:
        options: what the server was started with.
        exchange: sends changes to the scheduler processes and returns their state; raises RuntimeError if that fails.
    """

    async def answer(changes: Mapping[str, Change]) -> Response:
        try:
            return ORJSONResponse(await exchange(changes))
        except RuntimeError as error:
            return _error(500, str(error))

    async def get_sparse_decode() -> Response:
        return await answer({})

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def post_sparse_decode(request: Request) -> Response:
        source = f"POST {PATH}"
        try:
            changes = check_changes(parse_json((await request.body()).decode(), source), options)
        except UnicodeDecodeError:
            return _error(400, f"{source}: not valid JSON (not UTF-8)")
        except OptionsError as error:
            text = str(error)
            return _error(400, text if text.startswith(source) else f"{source}: {text}")
        return await answer(changes)

    app.add_api_route(PATH, get_sparse_decode, methods=["GET"])
    app.add_api_route(PATH, post_sparse_decode, methods=["POST"])


def check_before_streams(app: FastAPI, path: str, options: SparseDecodeOptions) -> None:
    """Makes the route `path`, which takes SGLang's GenerateReqInput, refuse wrong `custom_params` with HTTP 400.

    Without streaming, SGLang does so itself when a check in the tokenizer manager raises; a stream has answered HTTP
    200 by then.

    Raises:
        LookupError: there is no such route.
    """
    routes: list[Any] = app.router.routes
    index = next((i for i, route in enumerate(routes) if getattr(route, "path", None) == path), None)
    if index is None:
        raise LookupError(f"SGLang's HTTP server has no route {path}")
    route = routes[index]
    original = route.endpoint

    @functools.wraps(original)
    async def checked(obj: Any, request: Any) -> Any:
        try:
            for params in _sampling_params(obj):
                check_custom_params(params.get("custom_params"), options)
        except OptionsError as error:
            return _error(400, str(error))
        return await original(obj, request)

    routes[index] = type(route)(
        path,
        endpoint=checked,
        methods=route.methods,
        response_class=route.response_class,
        dependencies=route.dependencies,
    )


def _sampling_params(obj: Any) -> list[Mapping[str, Any]]:
    params = obj.sampling_params
    return [item for item in (params if isinstance(params, list) else [params]) if isinstance(item, Mapping)]


def _error(status: int, message: str) -> Response:
    return ORJSONResponse({"error": {"message": message}}, status_code=status)
