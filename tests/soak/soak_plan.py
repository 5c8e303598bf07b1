"""What a soak asks of a server: rounds of requests and interruptions, all drawn from one seed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Literal

VOCABULARY = 256
_GAMMAS = (0.3, 0.6, 0.9, 0.97, 1.0)

Ending = Literal["finish", "abort", "disconnect", "refused"]


@dataclasses.dataclass(frozen=True)
class Scale:
    """How long requests are, and the server that they are asked of."""

    page_size: int
    pool_tokens: int
    """The server's KV pool: little more than one of the longest requests."""
    context: int
    """More than the pool, so that prompts may fit the one and not the other."""
    chunk: int
    """Tokens that are prefilled at once."""
    min_context: int
    unit: int = 1
    """Lengths of prompts are drawn as multiples of it; the longest has 900."""

    @property
    def longest_prompt(self) -> int:
        return 900 * self.unit


SCALES = {
    "short": Scale(page_size=32, pool_tokens=1536, context=4096, chunk=128, min_context=64),
    # Prompts of up to 29,700 tokens, and of 8,250 where answers grow out of the pool together.
    "long": Scale(page_size=64, pool_tokens=40_960, context=49_152, chunk=4096, min_context=2048, unit=33),
}


@dataclasses.dataclass(frozen=True)
class Request:
    """One request: what is asked, and how the client ends it."""

    number: int
    ids: tuple[int, ...]
    tokens: int
    family: int
    """Requests of one family may share a prefix."""
    is_twin: bool = False
    """Whether an earlier request of the round has the same prompt."""
    route: Literal["/generate", "/v1/completions"] = "/generate"
    stream: bool = False
    temperature: float = 0.0
    n: int = 1
    custom: dict[str, Any] | None = None
    """The request's own `custom_params.sparse_decode`."""
    ending: Ending = "finish"
    after_chunks: int | None = None
    """A stream is ended after so many chunks."""
    after_seconds: float = 0.0
    """Else the request is ended so long after it was sent."""

    @property
    def gives_up(self) -> bool:
        """Whether the client hangs up after a time, and not after some chunks."""
        return self.ending == "disconnect" and self.after_chunks is None

    def body(self, rid: str) -> dict[str, Any]:
        custom = {} if self.custom is None else {"custom_params": {"sparse_decode": self.custom}}
        if self.route == "/v1/completions":
            return {
                "model": "default",
                "prompt": list(self.ids),
                "max_tokens": self.tokens,
                "temperature": self.temperature,
                "ignore_eos": True,
                "n": self.n,
                "stream": self.stream,
                "rid": rid,
                **custom,
            }
        sampling = {
            "temperature": self.temperature,
            "max_new_tokens": self.tokens,
            "ignore_eos": True,
            "n": self.n,
            **custom,
        }
        return {"input_ids": list(self.ids), "sampling_params": sampling, "stream": self.stream, "rid": rid}


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happens to the whole server between two requests."""

    kind: Literal["flush", "change", "pause", "look"]
    change: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For `change`: the body of `POST /sparse_decode`."""
    mode: str = ""
    """For `pause`: abort, in_place or retract."""
    seconds: float = 0.0
    """How long a pause lasts."""


def plan(seed: int, round_number: int, requests: int, scale: Scale = SCALES["short"]) -> list[Request | Event]:
    """The steps of one round, in the order in which they begin.

    Every other round has short prompts and long answers, which grow out of the pool together and are retracted.
    """
    draw = random.Random(f"{seed}/{round_number}")
    grows = round_number % 2 == 1
    families = [_ids(draw, 700 * scale.unit) for _ in range(4)]
    steps: list[Request | Event] = []
    made: list[Request] = []
    for number in range(requests):
        if draw.random() < 0.08:
            steps.append(_event(draw))
        made.append(_request(draw, number, families, made, grows, scale))
        steps.append(made[-1])
    return steps


def _event(draw: random.Random) -> Event:
    kind = draw.choices(("flush", "change", "pause", "look"), (2, 3, 3, 2))[0]
    if kind == "change":
        changes: list[dict[str, Any]] = [{"gamma": draw.choice((*_GAMMAS, None))}, {"enabled": draw.random() < 0.6}]
        return Event("change", change=draw.choice([*changes, changes[0] | changes[1]]))
    if kind == "pause":
        return Event("pause", mode=draw.choice(("abort", "in_place", "retract")), seconds=draw.uniform(0, 0.3))
    return Event(kind)


def _request(
    draw: random.Random,
    number: int,
    families: list[tuple[int, ...]],
    made: list[Request],
    grows: bool,
    scale: Scale,
) -> Request:
    custom = draw.choices((None, {"gamma": draw.choice(_GAMMAS)}, {"dense": True}), (5, 3, 1))[0]
    kind = draw.choices(("plain", "abort", "disconnect", "refused", "several", "sampled"), (60, 12, 8, 4, 5, 5))[0]
    if kind == "refused":
        return _refused(draw, number, scale)
    ids, family = _prompt(draw, number, families, (250 if grows else 900) * scale.unit, scale)
    twin = draw.random() < 0.05 and bool(made)
    if twin:
        original = draw.choice(made)
        ids, family = original.ids[: scale.longest_prompt], original.family
    asked = Request(number, ids, _tokens(draw, grows), family, is_twin=twin, custom=custom, stream=draw.random() < 0.7)
    if kind == "several":
        route = draw.choice(("/generate", "/v1/completions"))
        stream = asked.stream and route == "/v1/completions"
        temperature = draw.choice((0.0, 1.0))
        return dataclasses.replace(asked, n=draw.choice((2, 3)), route=route, stream=stream, temperature=temperature)
    if kind == "sampled":
        return dataclasses.replace(asked, temperature=1.0, route=draw.choice(("/generate", "/v1/completions")))
    if kind in ("abort", "disconnect"):
        # Before prefill, during it, or after it.
        chunks = draw.choice((None, 1, draw.randrange(1, 30))) if asked.stream else None
        seconds = draw.choice((0.0, draw.uniform(0, 0.2), draw.uniform(0.2, 2)))
        tokens = max(asked.tokens, draw.randrange(1, 120))
        return dataclasses.replace(asked, ending=kind, after_chunks=chunks, after_seconds=seconds, tokens=tokens)
    return asked


def _refused(draw: random.Random, number: int, scale: Scale) -> Request:
    """A request that is answered with HTTP 400: too long for the context or the pool, or wrong settings."""
    if draw.random() < 0.6:
        length = draw.choice((scale.pool_tokens + 1, scale.context + 1, scale.context + draw.randrange(2, 500)))
        # No stream: that answers HTTP 200 before SGLang looks at the length.
        return Request(number, _ids(draw, length), 1, -number - 1, ending="refused")
    wrong = draw.choice(({"gamma": 1.5}, {"gamma": "0.9"}, {"dense": 1}, {"delta": 3}, {"unknown": 1}, [1]))
    return Request(number, _ids(draw, 40), 4, -number - 1, custom=wrong, stream=draw.random() < 0.3, ending="refused")


def _prompt(
    draw: random.Random, number: int, families: list[tuple[int, ...]], longest: int, scale: Scale
) -> tuple[tuple[int, ...], int]:
    """A prompt of at most `longest` tokens, and its family."""
    if draw.random() < 0.35:
        length = draw.choice((draw.randrange(1, 40), draw.randrange(40, 300), draw.randrange(300, 900)))
        return _ids(draw, min(length * scale.unit, longest)), -number - 1
    family = draw.randrange(len(families))
    pages = draw.randrange(1, min(len(families[family]), longest) // scale.page_size)
    # At a page border, next to it, or anywhere.
    cut = pages * scale.page_size + draw.choice((0, 0, -1, 1, draw.randrange(scale.page_size)))
    tail = draw.choice((2, draw.randrange(2, 40), scale.page_size, draw.randrange(40, 200)))
    # Unlike those of other requests.
    tail = max(2, min(tail, longest - cut))
    return families[family][:cut] + _ids(draw, tail), family


def _tokens(draw: random.Random, grows: bool) -> int:
    ranges = ((1, 2), (2, 16), (16, 64), (64, 260))
    return draw.randrange(*draw.choices(ranges, (1, 1, 2, 12) if grows else (2, 5, 4, 3))[0])


def _ids(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(VOCABULARY) for _ in range(length))
