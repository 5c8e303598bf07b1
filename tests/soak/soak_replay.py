"""Asks a quiet server again for what it answered in a soak, and counts tokens that differ.

Prefill is dense, so keys and values of a prompt do not depend on where they came from, but those of generated tokens
depend on what was read. A retracted request gets keys and values of its tokens so far from a prefill: it is asked again
in parts, one from each retraction to the next.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import soak_border
import soak_server
from soak_client import Answer, Outcome
from soak_forced import Token, force
from soak_part import Part
from soak_plan import SCALES, Scale

_AT_ONCE = 8
_CANDIDATES = 12


@dataclasses.dataclass
class Tally:
    """What replays found."""

    answers: int = 0
    tokens: int = 0
    exempt: int = 0
    """Tokens where rounding may have chosen between the two best."""
    border_tokens: int = 0
    """Tokens that a rounding chose among others than the two best (soak_border.py)."""
    border_prompts: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    """Their prompts: several answers to one have the same keys."""
    wrong_tokens: int = 0
    unchecked_answers: int = 0
    """In flight during a change of settings, retracted at a place that is not known, or sampled."""
    borders: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)


def replay(server: Any, outcomes: Iterable[Outcome], scale: Scale = SCALES["short"]) -> Tally:
    """Checks all answers that can be checked; leaves the server with its own settings and an empty cache."""
    tally = Tally()
    groups: dict[tuple[float | None, bool], list[list[tuple[Part, ...]]]] = {}
    for outcome in outcomes:
        for answer in outcome.answers:
            if not answer.ids:
                continue
            ways = _ways(outcome, answer)
            if not ways:
                tally.unchecked_answers += 1
                continue
            tally.answers += 1
            tally.tokens += len(answer.ids)
            groups.setdefault((outcome.before.gamma, outcome.before.enabled), []).append(ways)
    for (gamma, enabled), checks in groups.items():
        change(server, gamma=gamma, enabled=enabled)
        for ways, together in _differing(server, checks, scale):
            _judge(server, ways, together, tally, scale)
    change(server, gamma=None, enabled=True)
    soak_server.flush(server)
    return tally


def change(server: Any, **changes: Any) -> None:
    server.post("/sparse_decode", changes).raise_for_status()


def _ways(outcome: Outcome, answer: Answer) -> list[tuple[Part, ...]]:
    """The ways in which the answer may have come about; none if it cannot be checked."""
    request, settings = outcome.request, outcome.before
    if request.temperature or settings != outcome.after or settings.is_changing or not answer.are_cuts_known:
        return []
    if answer.retractions and (request.is_twin or request.n > 1):
        # A prefill may have found a twin's tokens in the cache, with keys and values of sparse decode.
        return []
    choices = [range(low, high + 1) for low, high in answer.cuts]
    ways = []
    for cuts in itertools.islice(itertools.product(*choices), _CANDIDATES):
        # A prefill's own token is not a sparse one, and none follow if the request ended there.
        borders = sorted({0, *cuts, len(answer.ids)})
        ids = tuple(answer.ids)
        ways.append(
            tuple(
                Part(request, settings, request.ids + ids[:start], ids[start:end])
                for start, end in itertools.pairwise(borders)
            )
        )
    return ways


def _differing(
    server: Any, checks: list[list[tuple[Part, ...]]], scale: Scale
) -> list[tuple[list[tuple[Part, ...]], dict[Part, list[int]]]]:
    """Those checks of which the first way, asked for together with others, does not give the same tokens, and these."""
    parts = {id(part): part for ways in checks for part in ways[0]}
    got: dict[int, list[int]] = {}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for wave in _waves(list(parts.values()), scale):
            soak_server.flush(server)
            answers = pool.map(lambda part: _ask(server, part), wave)
            got |= {id(part): answer["output_ids"] for part, answer in zip(wave, answers, strict=True)}
    differing = []
    for ways in checks:
        together = {part: got[id(part)] for part in ways[0]}
        if any(tuple(ids) != part.expected for part, ids in together.items()):
            differing.append((ways, together))
    return differing


def _waves(parts: list[Part], scale: Scale) -> Iterator[list[Part]]:
    """Parts that fit into the pool together, none with a prefix of another."""
    rest = sorted(parts, key=lambda part: len(part.expected))
    while rest:
        wave: list[Part] = []
        left = []
        for part in rest:
            needed = sum(each.slots(scale) for each in (*wave, part))
            fits = needed <= scale.pool_tokens * 3 // 4 or not wave
            alone = all(other.request.family != part.request.family for other in wave)
            (wave if fits and alone and len(wave) < _AT_ONCE else left).append(part)
        yield wave
        rest = left


def _judge(
    server: Any, ways: list[tuple[Part, ...]], together: dict[Part, list[int]], tally: Tally, scale: Scale
) -> None:
    """Asks for each way alone, token by token; the answer is right if one of them gives it, but for places where
    rounding chose."""
    best: list[_Compared] | None = None
    for way in ways:
        compared = [each for part in way for each in _compare(server, part, together.get(part, list(part.expected)))]
        if best is None or _apart(compared) < _apart(best):
            best = compared
        if not _apart(best):
            break
    assert best is not None
    tally.exempt += sum(token.is_exempt for each in best for token in each.tokens)
    for each in best:
        if not each.apart:
            continue
        if tally.wrong or len(tally.border_prompts) > 1:
            verdict = soak_border.Verdict(False, "not looked into, since the soak has failed by now")
        else:
            verdict = soak_border.judge(server, each.part, each.tokens, scale)
        (tally.borders if verdict.is_border else tally.wrong).append(f"{each}; {verdict.found}")
        if verdict.is_border:
            tally.border_prompts.add(each.part.request.ids)
            tally.border_tokens += len(each.apart)
        else:
            tally.wrong_tokens += len(each.apart)


@dataclasses.dataclass(frozen=True)
class _Compared:
    """Tokens that a part got, as the quiet server sees them when it is asked for these alone."""

    part: Part
    what: str
    tokens: list[Token]

    @property
    def apart(self) -> list[int]:
        return [position for position, token in enumerate(self.tokens) if token.is_apart]

    def __str__(self) -> str:
        position = self.apart[0]
        token, rest = self.tokens[position], len(self.apart) - 1
        return (
            f"{self.part}: token {self.part.number(position)} {self.what} is {token.id}, alone {token.rival}, "
            f"margin {token.behind:.4f} nats" + (f", and {rest} tokens after it" if rest else "")
        )


def _compare(server: Any, part: Part, together: list[int]) -> list[_Compared]:
    """What a part was served, and what it got when it was replayed together with others if that is not the same."""
    compared = [_Compared(part, "served", force(server, part, part.expected))]
    if tuple(together) != part.expected:
        compared.append(_Compared(part, "replayed in a batch", force(server, part, together)))
    return compared


def _apart(compared: list[_Compared]) -> int:
    return sum(len(each.apart) for each in compared)


def _ask(server: Any, part: Part) -> dict[str, Any]:
    response = server.post("/generate", part.body(len(part.expected)))
    response.raise_for_status()
    return response.json()
