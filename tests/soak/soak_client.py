"""Sends one request of a soak, ends it as planned, and keeps what came back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import requests
from soak_plan import Request

ANSWER_SECONDS = 240
"""A request without an answer for so long is a hang."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a server decodes with; `era` differs before, during and after each change."""

    era: int = 0
    gamma: float | None = None
    enabled: bool = True
    is_changing: bool = False


@dataclasses.dataclass
class Answer:
    """One choice of an answer."""

    ids: list[int] = dataclasses.field(default_factory=list)
    retractions: int = 0
    cached_tokens: int = 0
    finish: str | None = None
    cuts: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """For each retraction, the least and the largest number of tokens that there may have been."""
    are_cuts_known: bool = True


@dataclasses.dataclass
class Outcome:
    request: Request
    before: Settings
    after: Settings
    status: int | None = None
    answers: list[Answer] = dataclasses.field(default_factory=list)
    failure: str | None = None
    """What went wrong, if the server did not behave."""

    @property
    def was_ended(self) -> bool:
        """Whether the answer was cut short, by this request's client or by a pause."""
        return any(answer.finish == "abort" for answer in self.answers)


class Client:
    """Talks to one server; safe to use from several threads."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.settings = Settings()
        self.aborts_begun = 0
        """Pauses that abort all requests."""
        self.aborts_over = 0
        self._name = name

    def send(self, request: Request) -> Outcome:
        outcome, over = Outcome(request, self.settings, self.settings), self.aborts_over
        # SGLang aborts whatever begins with the name that it is told: none may begin with another's.
        rid = f"{self._name}-{request.number}."
        timer = None
        if request.ending == "abort" and request.after_chunks is None:
            timer = threading.Timer(request.after_seconds, self.abort, (rid,))
            timer.start()
        try:
            self._exchange(request, rid, outcome, over)
        except (requests.RequestException, ValueError, KeyError) as error:
            # In the middle of a stream, a timeout is a ConnectionError.
            if not (request.gives_up and ("timed out" in str(error) or isinstance(error, requests.Timeout))):
                outcome.failure = f"{type(error).__name__}: {error}"
        finally:
            if timer is not None:
                timer.join()
        outcome.after = self.settings
        if outcome.was_ended and request.ending != "abort" and not self._was_told_to_abort(over):
            outcome.failure = outcome.failure or "aborted, which nobody had asked for"
        return outcome

    def _was_told_to_abort(self, over: int) -> bool:
        """Whether a pause aborted all requests since `over` such pauses were over."""
        return self.aborts_begun > over

    def abort(self, rid: str) -> None:
        with contextlib.suppress(requests.RequestException):
            requests.post(f"{self.url}/abort_request", json={"rid": rid}, timeout=ANSWER_SECONDS)

    def _exchange(self, request: Request, rid: str, outcome: Outcome, over: int) -> None:
        timeout = max(0.02, request.after_seconds) if request.gives_up else ANSWER_SECONDS
        body, url = request.body(rid), f"{self.url}{request.route}"
        with requests.post(url, json=body, timeout=(ANSWER_SECONDS, timeout), stream=request.stream) as response:
            outcome.status = response.status_code
            if request.ending == "refused":
                told = self._was_told_to_abort(over)
                if not _was_refused(response.status_code, response.text, told_to_abort=told):
                    outcome.failure = (
                        f"HTTP {response.status_code} for a request that should be refused: {response.text[:300]}"
                    )
                return
            if response.status_code != 200:
                self._check_status(request, response, outcome)
                return
            if request.stream:
                outcome.answers = [Answer() for _ in range(request.n)]
                self._read_stream(request, rid, response, outcome)
            else:
                outcome.answers = _whole(response.json(), request.route)
        if request.ending == "finish" and not outcome.was_ended:
            _check_length(request, outcome)

    def _check_status(self, request: Request, response: requests.Response, outcome: Outcome) -> None:
        """Aborted before they began, by their client or a pause, requests get an error."""
        if "abort" in response.text.lower() and response.status_code < 500:
            outcome.answers = [Answer(finish="abort")]
        else:
            outcome.failure = f"HTTP {response.status_code}: {response.text[:300]}"

    def _read_stream(self, request: Request, rid: str, response: requests.Response, outcome: Outcome) -> None:
        deadline = time.monotonic() + request.after_seconds
        for count, event in enumerate(_events(response), 1):
            if "error" in event:
                if "abort" in json.dumps(event).lower():
                    outcome.answers[0].finish = "abort"
                else:
                    outcome.failure = f"an error in a stream: {json.dumps(event)[:300]}"
                continue
            _add(event, request, outcome.answers)
            is_time = count == request.after_chunks or (request.after_chunks is None and time.monotonic() > deadline)
            if request.ending == "disconnect" and is_time:
                return
            if request.ending == "abort" and count == request.after_chunks:
                self.abort(rid)


def _events(response: requests.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def _add(event: dict[str, Any], request: Request, answers: list[Answer]) -> None:
    if request.route != "/generate":
        for choice in event["choices"]:
            answers[choice["index"]].finish = choice["finish_reason"] or answers[choice["index"]].finish
        return
    answer, meta = answers[event.get("index", 0)], event["meta_info"]
    ids, retractions = event["output_ids"], meta.get("num_retractions", answer.retractions)
    if (meta["finish_reason"] or {}).get("type") == "abort":
        ids = _aborted(ids, answer.ids, meta.get("completion_tokens", len(ids)))
    if ids[: len(answer.ids)] != answer.ids:
        raise ValueError(f"a stream took back tokens: {answer.ids} became {ids}")
    if retractions > answer.retractions:
        cut = (len(answer.ids), max(len(answer.ids), len(ids) - 1))
        answer.cuts += [cut] * (retractions - answer.retractions)
    answer.ids, answer.retractions = ids, retractions
    answer.cached_tokens = meta.get("cached_tokens", answer.cached_tokens)
    answer.finish = (meta["finish_reason"] or {}).get("type")


def _aborted(ids: list[int], came: list[int], tokens: int) -> list[int]:
    """The tokens of a stream that was aborted, of which `came` were there before.

    Aborted while it waited, it ends with its last token alone, however many `tokens` it had.
    """
    if len(ids) == tokens > 0:
        return ids
    if not ids or tokens > len(came) + 1:
        return came
    return [*came[: tokens - 1], *ids[-1:]]


def _was_refused(status: int, text: str, *, told_to_abort: bool) -> bool:
    """Whether a request that has to be refused was, or was ended before by a pause, if one aborted all requests."""
    if status == 400 or not told_to_abort:
        return status == 400
    if status != 200:
        # The pause came before the scheduler had it.
        return status == 499
    try:
        content = json.loads(text)
        meta = content["meta_info"]
        return (meta["finish_reason"] or {}).get("type") == "abort" and not content.get("output_ids")
    except (ValueError, KeyError, TypeError):
        return False


def _whole(content: Any, route: str) -> list[Answer]:
    if route != "/generate":
        return [Answer(finish=choice["finish_reason"]) for choice in content["choices"]]
    answers = []
    for item in content if isinstance(content, list) else [content]:
        meta = item["meta_info"]
        retractions = meta.get("num_retractions", 0)
        finish = (meta["finish_reason"] or {}).get("type")
        cached = meta.get("cached_tokens", 0)
        ids = item.get("output_ids") or []
        # Aborted while it waited to go on, an answer does not say whether it had been retracted.
        known = "num_retractions" in meta and not retractions
        answers.append(Answer(ids, retractions, cached, finish, are_cuts_known=known))
    return answers


def _check_length(request: Request, outcome: Outcome) -> None:
    """An answer that nobody ended has all its tokens."""
    if len(outcome.answers) != request.n:
        outcome.failure = f"{len(outcome.answers)} answers for n={request.n}"
    for answer in outcome.answers:
        if answer.finish != "length":
            outcome.failure = f"finish_reason {answer.finish} after {len(answer.ids)} of {request.tokens} tokens"
        elif request.route == "/generate" and len(answer.ids) != request.tokens:
            outcome.failure = f"{len(answer.ids)} of {request.tokens} tokens"
