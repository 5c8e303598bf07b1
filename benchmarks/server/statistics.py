"""Numbers from streamed answers."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from benchmarks.errors import ServerError

from .client import Answer


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of `values` stay below, between two of them by linear interpolation.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def tpot_together(answers: Sequence[Answer]) -> float:
    """Seconds between tokens while all `answers` were being decoded: the median over them of each one's mean.

    Raises ServerError if there was no such time, or hardly any.
    """
    first, last = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
    means = []
    for answer in answers:
        a = bisect.bisect_left(answer.times, first)
        b = bisect.bisect_right(answer.times, last) - 1
        tokens = answer.counts[b] - answer.counts[a] if 0 <= a < b else 0
        if 2 * tokens < answer.counts[-1]:
            raise ServerError(
                f"only {tokens} of {answer.counts[-1]} tokens were decoded while all requests ran: raise --tokens"
            )
        means.append((answer.times[b] - answer.times[a]) / tokens)
    return percentile(means, 0.5)


def throughput(answers: Sequence[Answer]) -> float:
    """Output tokens a second from the first request's start to the last token of all."""
    elapsed = max(answer.times[-1] for answer in answers) - min(answer.started for answer in answers)
    return sum(answer.counts[-1] for answer in answers) / elapsed


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[float, float, float]:
    """Of pairs of answers: the share of equal tokens by position, of equal answers, and of tokens before the first
    difference."""
    pairs = list(zip(ours, theirs, strict=True))
    total = sum(len(a) for a, _ in pairs)
    equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True))
    before = sum(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs)
    return equal / total, sum(list(a) == list(b) for a, b in pairs) / len(pairs), before / total
