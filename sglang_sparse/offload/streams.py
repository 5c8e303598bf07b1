"""The streams that offload works on. A step names its streams, events, reads and writes; what runs them decides.

Streams: `forward` is SGLang's; `prefetch` runs beside decode steps, `load` and `store` beside prefill. An event is
recorded on one stream and waited for once on another: what was recorded in an earlier graph capture must not be
waited for in a later one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch

FORWARD = "forward"
PREFETCH = "prefetch"
LOAD = "load"
STORE = "store"

Resource = Hashable
"""What an operation reads or writes, such as `("hot", layer)`."""


class Streams:
    """One stream for everything, as on a CPU: whatever comes next waits for what came before."""

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Operations inside run on `stream`."""
        yield

    def record(self, event: str) -> None:
        """`event` is when the current stream has done all so far."""

    def wait(self, event: str) -> None:
        """What follows on the current stream comes after `event`; nothing if it was not recorded anew."""

    def operation(self, name: str, *, reads: Iterable[Resource], writes: Iterable[Resource]) -> None:
        """Announces an operation on the current stream, just before it is issued."""


class CudaStreams(Streams):
    """Streams of a GPU; `forward` is whichever is current. Forks and joins can be captured in a CUDA graph."""

    def __init__(self, device: torch.device | str) -> None:
        self._side: dict[str, Any] = {name: torch.cuda.Stream(device) for name in (PREFETCH, LOAD, STORE)}
        self._events: dict[str, Any] = {}
        self._recorded: set[str] = set()

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        if stream == FORWARD:
            yield
            return
        with torch.cuda.stream(self._side[stream]):
            yield

    def record(self, event: str) -> None:
        if event not in self._events:
            self._events[event] = torch.cuda.Event()
        self._events[event].record()
        self._recorded.add(event)

    def wait(self, event: str) -> None:
        if event in self._recorded:
            self._recorded.remove(event)
            torch.cuda.current_stream().wait_event(self._events[event])
