"""A short soak, and that a soak finds what it looks for. `SOAK_SEED` replays a failure."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import soak_server
from random_model import write_random_model
from soak_client import Answer, Client, Outcome, Settings, _add, _was_refused
from soak_plan import SCALES, Event, Request, Scale, plan
from soak_replay import _ways, replay
from soak_run import Soak

SECONDS = 60
"""No round begins later than this."""
ROUNDS, ROUND = 3, 30
SEED = int(os.environ.get("SOAK_SEED", "1"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("soak")
    model = write_random_model(folder / "model")
    with soak_server.start(model, "resident", folder / "server.log", SCALES["short"]) as running:
        yield running


@pytest.mark.server
def test_nothing_leaks_and_no_token_is_wrong_whatever_happens_to_requests(server: Any) -> None:
    soak, began = Soak(server, "resident", SEED), time.monotonic()
    outcomes: list[Outcome] = []
    for number in range(ROUNDS):
        if time.monotonic() - began < SECONDS or not number:
            outcomes += soak.run_round(number, ROUND)
    report = soak.finish()
    assert not report.failures, "\n".join(report.failures)
    assert report.checked_tokens > 100
    assert report.evicted_tokens > 0
    assert report.prefix_hits > 0

    checked = ((outcome, answer) for outcome in outcomes for answer in outcome.answers if _ways(outcome, answer))
    tampered, answer = next((outcome, answer) for outcome, answer in checked if answer.ids and not answer.retractions)
    wrong = dataclasses.replace(answer, ids=[*answer.ids[:-1], (answer.ids[-1] + 1) % 256])
    tally = replay(server, [dataclasses.replace(tampered, answers=[wrong])])
    assert len(tally.wrong) == 1
    assert f"token {len(answer.ids) - 1} served is {wrong.ids[-1]}" in tally.wrong[0]


def test_a_seed_gives_the_same_plan_and_another_seed_does_not() -> None:
    assert plan(1, 0, 50) == plan(1, 0, 50)
    assert plan(1, 0, 50) != plan(2, 0, 50)
    assert plan(1, 0, 50) != plan(1, 1, 50)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_plans_hold_all_that_they_promise(scale: Scale) -> None:
    steps = [step for round_number in range(8) for step in plan(3, round_number, 100, scale)]
    asked = [step for step in steps if isinstance(step, Request)]
    events = [step for step in steps if isinstance(step, Event)]
    assert {event.kind for event in events} == {"flush", "change", "pause", "look"}
    assert {event.mode for event in events if event.kind == "pause"} == {"abort", "in_place", "retract"}
    assert {request.ending for request in asked} == {"finish", "abort", "disconnect", "refused"}
    assert {request.stream for request in asked} == {True, False}
    assert any(len(request.ids) > scale.context for request in asked)
    assert any(scale.pool_tokens < len(request.ids) + request.tokens <= scale.context for request in asked)
    assert any(request.tokens == 1 for request in asked)
    assert any(request.n > 1 for request in asked)
    served = [request for request in asked if request.ending != "refused"]
    # SGLang never admits a request that has no room for a page beyond its largest length, nor any request after it.
    assert max(len(request.ids) + request.tokens for request in served) + scale.page_size < scale.pool_tokens
    assert max(len(request.ids) + request.tokens for request in served) < scale.context


def test_what_was_served_during_a_change_or_sampled_is_not_checked() -> None:
    request = Request(0, (1, 2, 3), 4, 0)
    answer = Answer([5, 6, 7, 8])
    quiet = Settings(2)
    assert len(_ways(Outcome(request, quiet, quiet), answer)) == 1
    assert not _ways(Outcome(request, quiet, Settings(4)), answer)
    changing = Settings(3, is_changing=True)
    assert not _ways(Outcome(request, changing, changing), answer)
    assert not _ways(Outcome(dataclasses.replace(request, temperature=1.0), quiet, quiet), answer)


def test_retracted_answers_are_replayed_in_parts() -> None:
    outcome = Outcome(Request(0, (1, 2, 3), 4, 0), Settings(), Settings())
    answer = Answer([5, 6, 7, 8], retractions=1, cuts=[(2, 3)])
    parts = [[(part.prompt, part.expected) for part in way] for way in _ways(outcome, answer)]
    assert parts == [
        [((1, 2, 3), (5, 6)), ((1, 2, 3, 5, 6), (7, 8))],
        [((1, 2, 3), (5, 6, 7)), ((1, 2, 3, 5, 6, 7), (8,))],
    ]
    # Where it was retracted is not known: it was not streamed.
    assert not _ways(outcome, dataclasses.replace(answer, cuts=[], are_cuts_known=False))


@pytest.mark.parametrize(
    ("status", "text", "refused"),
    [
        (400, "too long", True),
        (499, "", "if told"),
        (500, "", False),
        (200, '{"meta_info": {"finish_reason": {"type": "abort"}}, "output_ids": []}', "if told"),
        (200, '{"meta_info": {"finish_reason": {"type": "abort"}}, "output_ids": [5]}', False),
        (200, '{"meta_info": {"finish_reason": {"type": "length"}}, "output_ids": [5]}', False),
        (200, "data: {}", False),
    ],
)
def test_what_counts_as_refused(status: int, text: str, refused: bool | str) -> None:
    assert _was_refused(status, text, told_to_abort=True) is bool(refused)
    assert _was_refused(status, text, told_to_abort=False) is (refused is True)


@pytest.mark.parametrize("ending", ["finish", "abort"])
@pytest.mark.parametrize(("begun", "over"), [(0, 0), (1, 1), (1, 0), (2, 1)])
def test_an_answer_is_cut_short_only_if_somebody_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, ending: Any, begun: int, over: int
) -> None:
    def cut(client: Client, request: Request, rid: str, outcome: Outcome, over: int) -> None:
        outcome.answers = [Answer([5], finish="abort")]

    client = Client("", "test")
    client.aborts_begun, client.aborts_over = begun, over
    monkeypatch.setattr(Client, "_exchange", cut)
    outcome = client.send(Request(0, (1, 2, 3), 4, 0, ending=ending, after_chunks=1))
    assert bool(outcome.failure) is (ending == "finish" and begun == over)


@pytest.mark.parametrize(
    ("came", "last", "tokens", "kept"),
    [
        ([], [7], 1, [7]),
        ([], [7], 3, []),
        ([], [], 0, []),
        ([5], [5], 1, [5]),
        ([5], [7], 2, [5, 7]),
        ([5], [5, 7, 8], 3, [5, 7, 8]),
        ([5], [7], 3, [5]),
        ([5, 6], [6], 2, [5, 6]),
        ([5, 6], [], 2, [5, 6]),
    ],
)
def test_a_stream_that_is_aborted_keeps_the_tokens_that_are_known(
    came: list[int], last: list[int], tokens: int, kept: list[int]
) -> None:
    request, answers = Request(0, (1, 2, 3), 4, 0), [Answer(came)]
    event = {"output_ids": last, "meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": tokens}}
    _add(event, request, answers)
    assert (answers[0].ids, answers[0].finish) == (kept, "abort")


@pytest.mark.parametrize(("last", "tokens", "kind"), [([7], 1, "abort"), ([7], 2, "abort"), ([7], 1, "length")])
def test_a_stream_may_not_take_back_tokens(last: list[int], tokens: int, kind: str) -> None:
    event = {"output_ids": last, "meta_info": {"finish_reason": {"type": kind}, "completion_tokens": tokens}}
    with pytest.raises(ValueError, match="took back tokens"):
        _add(event, Request(0, (1, 2, 3), 4, 0), [Answer([5, 6])])


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"stale_pages": 2}, ["2 stale_pages"]),
        ({"wrong_slots": 1}, ["1 wrong_slots"]),
        ({"cached_tokens": 32}, ["32 of 128 KV slots leaked"]),
        ({"free_requests": 7}, ["1 request slots leaked"]),
    ],
)
def test_self_checks_are_read(changed: dict[str, int], found: list[str]) -> None:
    check = {"stale_pages": 0, "wrong_slots": 0, "total_tokens": 128, "free_tokens": 64, "cached_tokens": 64}
    check |= {"free_requests": 8, "total_requests": 8, **changed}
    assert soak_server.problems(check, idle=True) == found
