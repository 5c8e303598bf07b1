"""What each request read, in the tokenizer process: into an answer's `meta_info` and the `usage` of OpenAI's routes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from sglang_sparse.control.request import KEY

_ATTRIBUTE = "sparse_decode_usage"
"""Attribute of SGLang's request objects: kept blocks and blocks of each answer so far."""


def summary(usages: list[tuple[int, ...]]) -> dict[str, Any]:
    """The `sparse_decode` block of one answer or several: blocks read, all blocks, and the share.

    `usages` are of the heads of one tensor-parallel rank. With more ranks than one they say how many, and the block
    says which rank it is of.
    """
    kept, blocks = sum(usage[0] for usage in usages), sum(usage[1] for usage in usages)
    block = {"kept_fraction": kept / blocks, "kept_blocks": kept, "blocks": blocks}
    return block | {"tp_rank": 0, "tp_size": usages[0][2]} if len(usages[0]) > 2 else block


async def generate(original: Callable, manager: Any, obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
    """`TokenizerManager.generate_request`, whose finished answers say what they read."""
    async with contextlib.aclosing(original(manager, obj, request)) as responses:
        async for response in responses:
            for answer in response if isinstance(response, list) else [response]:
                _settle(answer, obj)
            yield response


async def stream(
    original: Callable, serving: Any, adapted_request: Any, request: Any, raw_request: Any
) -> AsyncGenerator[str, None]:
    """Server-sent events of an OpenAI route, whose usage event says what the request read."""
    async with contextlib.aclosing(original(serving, adapted_request, request, raw_request)) as events:
        async for event in events:
            yield _with_usage(event, adapted_request)


async def complete(original: Callable, serving: Any, adapted_request: Any, request: Any, raw_request: Any) -> Any:
    """The answer of `/v1/completions`, which has no `meta_info`: its `usage` says what the request read."""
    from fastapi.encoders import jsonable_encoder
    from fastapi.responses import ORJSONResponse

    response = await original(serving, adapted_request, request, raw_request)
    usages = getattr(adapted_request, _ATTRIBUTE, None)
    if not usages or not hasattr(response, "usage"):
        return response
    # SGLang's own encoding of the answer, and one more key.
    content = jsonable_encoder(response)
    content["usage"][KEY] = summary(usages)
    return ORJSONResponse(content)


def _settle(answer: Any, obj: Any) -> None:
    """Replaces the entries that arrived under our key, one a token, by the block of the last one."""
    meta_info = answer.get("meta_info") if isinstance(answer, dict) else None
    if not meta_info or not isinstance(meta_info.get(KEY), list):
        return
    entries = meta_info.pop(KEY)
    usage = entries[-1] if entries else None
    # The other entries are padding: another request finished in a step that this one was part of.
    if usage is None or meta_info.get("finish_reason") is None:
        return
    usage = tuple(map(int, usage))
    meta_info[KEY] = summary([usage])
    obj.__dict__.setdefault(_ATTRIBUTE, []).append(usage)


def _with_usage(event: str, obj: Any) -> str:
    """`event`, with our block if it is the event that ends a stream with its usage: the one without choices."""
    usages = getattr(obj, _ATTRIBUTE, None)
    if not usages or '"choices":[]' not in event or '"usage":{' not in event:
        return event
    content = json.loads(event.removeprefix("data: "))
    content["usage"][KEY] = summary(usages)
    return f"data: {json.dumps(content, separators=(',', ':'), ensure_ascii=False)}\n\n"
