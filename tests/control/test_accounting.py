"""What each request read: added by step, sent with its last output, whole after SGLang's slicing, summed in `usage`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import torch

from sglang_sparse.control import answers
from sglang_sparse.control.accounting import StepCounts, publish
from sglang_sparse.control.request import KEY


@dataclasses.dataclass
class Request:
    """What accounting sees of SGLang's Req."""

    output_ids: list[int] = dataclasses.field(default_factory=list)
    is_finished: bool = False
    is_retracted: bool = False
    customized_info: dict[str, list] | None = None

    def finished(self) -> bool:
        return self.is_finished


def counts(*rows: tuple[int, int]) -> StepCounts:
    # More rows than requests: those of a larger batch before.
    return StepCounts.copy(torch.tensor([*rows, (99, 99)]), len(rows))


def published(request: Request) -> list[int]:
    publish(request)
    assert request.customized_info is not None
    return request.customized_info[KEY][-1]


def test_steps_add_up_for_requests_that_still_run() -> None:
    first, second, third = Request(), Request(), Request()
    counts((1, 10), (2, 20), (3, 30)).add_to([first, second, third])
    # Under overlap a step is in flight when a request finishes, or is retracted: it does not count.
    second.is_finished = third.is_retracted = True
    counts((1, 10), (2, 20), (3, 30)).add_to([first, second, third])
    # A retracted request comes back, in another row.
    third.is_retracted = False
    counts((4, 40), (5, 50)).add_to([third, first])
    assert published(first) == [7, 70]
    assert published(second) == [2, 20]
    assert published(third) == [7, 70]


def test_counts_are_a_copy() -> None:
    buffer = torch.tensor([[1, 2]])
    step = StepCounts.copy(buffer, 1)
    buffer.fill_(7)
    request = Request()
    step.add_to([request])
    assert published(request) == [1, 2]


def test_a_request_that_took_no_decode_step_says_nothing() -> None:
    request = Request()
    publish(request)
    assert request.customized_info is None


def test_information_of_others_is_kept() -> None:
    request = Request(output_ids=[1], customized_info={"other": [5]})
    counts((1, 2)).add_to([request])
    publish(request)
    assert request.customized_info is not None
    assert request.customized_info["other"] == [5]


@pytest.mark.parametrize("tokens", [1, 2, 60])
@pytest.mark.parametrize("sent", [0, 1, 60])
def test_the_last_entry_survives_every_slice(tokens: int, sent: int) -> None:
    """SGLang sends entries from the last sent token on, pickled; streams then take those from the last token on."""
    request = Request(output_ids=list(range(tokens)))
    counts((3, 4)).add_to([request])
    publish(request)
    assert request.customized_info is not None
    entries = pickle.loads(pickle.dumps(request.customized_info[KEY][min(sent, tokens) : tokens]))
    assert entries[-1] == [3, 4]
    accumulated = [None] * min(sent, tokens) + entries
    assert accumulated[min(sent, tokens) :][-1] == [3, 4]
    assert (entries[tokens:] or [None])[-1] == [3, 4]


def test_one_of_several_ranks_says_how_many() -> None:
    request = Request(output_ids=[1])
    counts((3, 4)).add_to([request])
    publish(request, 2)
    assert request.customized_info is not None
    (last,) = settled(Body(), [answer(request.customized_info[KEY][:1], True)])
    assert last["meta_info"][KEY] == {
        "kept_fraction": 0.75,
        "kept_blocks": 3,
        "blocks": 4,
        "tp_rank": 0,
        "tp_size": 2,
    }


class Body:
    """A request object as SGLang's routes make it."""


def settled(obj: Any, responses: list[Any]) -> list[Any]:
    async def original(manager: Any, obj: Any, request: Any) -> AsyncGenerator[Any, None]:
        for response in responses:
            yield response

    async def run() -> list[Any]:
        return [response async for response in answers.generate(original, None, obj, None)]

    return asyncio.run(run())


def answer(entries: list | None, finished: bool) -> dict[str, Any]:
    info = {} if entries is None else {KEY: entries}
    return {"meta_info": {"finish_reason": {"type": "length"} if finished else None, **info}}


def test_the_last_answer_says_what_was_read() -> None:
    responses = [answer(None, False), answer([None, None], False), answer([None, None, [1, 4], [1, 4]], True)]
    first, second, last = (response["meta_info"] for response in settled(Body(), responses))
    assert KEY not in first
    assert KEY not in second
    assert last[KEY] == {"kept_fraction": 0.25, "kept_blocks": 1, "blocks": 4}


def test_padding_alone_says_nothing() -> None:
    """Another request finished in the same step; this one finished with its prefill."""
    (last,) = settled(Body(), [answer([None, None], True)])
    assert KEY not in last["meta_info"]
    (empty,) = settled(Body(), [answer([], True)])
    assert KEY not in empty["meta_info"]


def test_answers_of_one_request_are_summed() -> None:
    obj = Body()
    (batch,) = settled(obj, [[answer([[1, 4]], True), answer([[3, 4]], True)]])
    assert [item["meta_info"][KEY]["kept_fraction"] for item in batch] == [0.25, 0.75]

    async def original(*args: Any) -> AsyncGenerator[str, None]:
        yield 'data: {"choices":[{"text":"\\"choices\\":[],\\"usage\\":{}"}],"usage":{"prompt_tokens":1}}\n\n'
        yield 'data: {"choices":[],"usage":{"prompt_tokens":1},"model":"é"}\n\n'
        yield "data: [DONE]\n\n"

    async def run() -> list[str]:
        return [event async for event in answers.stream(original, None, obj, None, None)]

    content, usage, done = asyncio.run(run())
    assert KEY not in content
    assert done == "data: [DONE]\n\n"
    assert usage.endswith("\n\n")
    assert json.loads(usage.removeprefix("data: ")) == {
        "choices": [],
        "usage": {"prompt_tokens": 1, KEY: {"kept_fraction": 0.5, "kept_blocks": 4, "blocks": 8}},
        "model": "é",
    }


def test_a_closed_stream_closes_sglangs() -> None:
    closed = []

    async def original(*args: Any) -> AsyncGenerator[Any, None]:
        try:
            while True:
                yield {}
        finally:
            closed.append(True)

    async def run() -> None:
        stream = answers.generate(original, None, Body(), None)
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    assert closed == [True]
