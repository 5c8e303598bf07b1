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

import harness
import soak_server
from soak_client import Answer, Outcome, Settings
from soak_plan import SCALES, Request, Scale

MARGIN = max(1e-3, harness.SURE)
"""Nats between the two best tokens below which rounding may choose the second."""
_AT_ONCE = 8
_CANDIDATES = 12


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Tokens that a request got between two prefills."""

    request: Request
    settings: Settings
    prompt: tuple[int, ...]
    expected: tuple[int, ...]

    def slots(self, scale: Scale) -> int:
        return -(-(len(self.prompt) + len(self.expected)) // scale.page_size) * scale.page_size


@dataclasses.dataclass
class Tally:
    """What replays found."""

    answers: int = 0
    tokens: int = 0
    exempt: int = 0
    """Tokens where rounding may have chosen, and those after them."""
    unchecked_answers: int = 0
    """In flight during a change of settings, retracted at a place that is not known, or sampled."""
    wrong: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.answers += other.answers
        self.tokens += other.tokens
        self.exempt += other.exempt
        self.unchecked_answers += other.unchecked_answers
        self.wrong += other.wrong


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
            _judge(server, ways, together, tally)
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


def _judge(server: Any, ways: list[tuple[Part, ...]], together: dict[Part, list[int]], tally: Tally) -> None:
    """Asks for each way alone; the answer is right if one of them gives it, but for places where rounding chose."""
    best: tuple[int, list[str]] | None = None
    for way in ways:
        exempt, wrong = 0, []
        for part in way:
            more, problem = _compare(server, part, together.get(part, list(part.expected)))
            exempt += more
            wrong += [problem] if problem else []
        if best is None or len(wrong) < len(best[1]):
            best = (exempt, wrong)
        if not wrong:
            break
    assert best is not None
    tally.exempt += best[0]
    tally.wrong += best[1]


def _compare(server: Any, part: Part, together: list[int]) -> tuple[int, str | None]:
    """Exempt tokens of a part, asked for alone on an empty cache, and what is wrong with it.

    Args:
        together: what it got when it was replayed together with others.
    """
    soak_server.flush(server)
    answer = _ask(server, part, return_logprob=True, top_logprobs_num=2)
    alone = answer["output_ids"]
    for what, ids in (("served", part.expected), ("replayed in a batch", together)):
        position = next((i for i, pair in enumerate(zip(ids, alone, strict=True)) if pair[0] != pair[1]), None)
        if position is None:
            continue
        best, second = answer["meta_info"]["output_top_logprobs"][position][:2]
        if best[0] - second[0] <= MARGIN and ids[position] == second[1]:
            return len(alone) - position, None
        return 0, (
            f"request {part.request.number} (prompt {len(part.request.ids)}, {part.request.custom}, {part.settings}): "
            f"token {len(part.prompt) - len(part.request.ids) + position} {what} is {ids[position]}, alone "
            f"{alone[position]}, margin {best[0] - second[0]:.4f} nats"
        )
    return 0, None


def _ask(server: Any, part: Part, **more: Any) -> dict[str, Any]:
    whole = dataclasses.replace(part.request, ids=part.prompt, tokens=len(part.expected), stream=False, n=1)
    body = whole.body("") | more
    del body["rid"]
    response = server.post("/generate", body)
    response.raise_for_status()
    return response.json()
