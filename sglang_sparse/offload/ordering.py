"""Stream order, tested without a GPU: records a step's operations and finds pairs that nothing orders.

Two operations conflict if one writes what the other reads or writes. They are ordered if the first happens before the
second: earlier on the same stream, or over a chain of events that were recorded after the one and waited for before the
other. Vector clocks hold what each stream has seen of the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sglang_sparse.offload.streams import FORWARD, Resource, Streams


class OrderError(AssertionError):
    """Two operations conflict and nothing orders them."""


@dataclass(frozen=True)
class Operation:
    """What ran where, and when by the clock of its own stream."""

    name: str
    stream: str
    time: int
    clock: dict[str, int]
    """Of each stream, the last operation that happened before this one."""

    def after(self, other: Operation) -> bool:
        """Whether `other` happened before this operation."""
        return self.clock.get(other.stream, 0) >= other.time

    def __str__(self) -> str:
        return f"{self.name} (no. {self.time} on {self.stream})"


class OrderLog(Streams):
    """Streams that run everything at once and check that the order was not luck.

    Raises OrderError from `operation` as soon as it conflicts with an earlier one that did not happen before it.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._current = FORWARD
        self._clocks: dict[str, dict[str, int]] = {}
        self._events: dict[str, dict[str, int]] = {}
        self._writer: dict[Resource, Operation] = {}
        self._readers: dict[Resource, dict[str, Operation]] = {}

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, event: str) -> None:
        self._events[event] = dict(self._clock)

    def wait(self, event: str) -> None:
        for stream, time in self._events.pop(event, {}).items():
            self._clock[stream] = max(self._clock.get(stream, 0), time)

    @property
    def _clock(self) -> dict[str, int]:
        return self._clocks.setdefault(self._current, {})

    def operation(self, name: str, *, reads: Iterable[Resource], writes: Iterable[Resource]) -> None:
        reads, writes = set(reads), set(writes)
        stream = self._current
        time = self._clock.get(stream, 0) + 1
        made = Operation(name, stream, time, dict(self._clock))
        for resource in sorted(reads | writes, key=str):
            earlier = [self._writer[resource]] if resource in self._writer else []
            if resource in writes:
                earlier += self._readers.get(resource, {}).values()
            for other in earlier:
                if not made.after(other):
                    raise OrderError(f"{made} and {other} both use {resource}, and nothing orders them")
        self._clock[stream] = time
        for resource in reads - writes:
            # Of one stream the last reader stands for those before it.
            self._readers.setdefault(resource, {})[stream] = made
        for resource in writes:
            self._writer[resource] = made
            self._readers[resource] = {}
        self.operations.append(made)
