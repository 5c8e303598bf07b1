from __future__ import annotations

import pytest
from world import World

from sglang_sparse.offload.ordering import OrderError, OrderLog


def test_unordered_writes_and_reads_are_found() -> None:
    for first, second in (("writes", "writes"), ("writes", "reads"), ("reads", "writes")):
        log = OrderLog()
        log.operation("a", **{"reads": (), "writes": (), first: ["x"]})
        with log.on("side"), pytest.raises(OrderError, match=r"b .no. 1 on side. and a .no. 1 on forward. both use x"):
            log.operation("b", **{"reads": (), "writes": (), second: ["x"]})


def test_two_readers_need_no_order() -> None:
    log = OrderLog()
    log.operation("a", reads=["x"], writes=["y"])
    with log.on("side"):
        log.operation("b", reads=["x"], writes=["z"])
    assert [each.name for each in log.operations] == ["a", "b"]


def test_every_reader_has_to_come_before_the_next_writer() -> None:
    log = OrderLog()
    for stream in ("a", "b"):
        with log.on(stream):
            log.operation("read", reads=["x"], writes=())
            log.record(stream)
    log.wait("a")
    with pytest.raises(OrderError, match="on b"):
        log.operation("write", reads=(), writes=["x"])
    log.wait("b")
    log.operation("write", reads=(), writes=["x"])


def test_events_order_over_a_third_stream() -> None:
    log = OrderLog()
    log.operation("write", reads=(), writes=["x"])
    log.record("1")
    with log.on("b"):
        log.wait("1")
        log.record("2")
    with log.on("c"):
        log.wait("2")
        log.operation("read", reads=["x"], writes=())


def test_an_event_says_nothing_of_what_came_after_it() -> None:
    log = OrderLog()
    log.record("early")
    log.operation("write", reads=(), writes=["x"])
    with log.on("side"):
        log.wait("early")
        with pytest.raises(OrderError):
            log.operation("read", reads=["x"], writes=())


def test_an_event_is_waited_for_once() -> None:
    """A wait in a later capture for an event of an earlier one is an error on a GPU; here it orders nothing."""
    log = OrderLog()
    log.operation("write", reads=(), writes=["x"])
    log.record("done")
    with log.on("b"):
        log.wait("done")
    with log.on("c"):
        log.wait("done")
        with pytest.raises(OrderError):
            log.operation("read", reads=["x"], writes=())


def decode(log: OrderLog) -> World:
    world = World((5, 5), streams=log)
    world.start(tokens=60)
    for _ in range(3):
        world.decode(density=0.6, forecast=0.8)
    return world


def test_steps_with_forecasts_are_ordered() -> None:
    log = OrderLog()
    decode(log)
    assert {each.stream for each in log.operations} == {"forward", "prefetch"}


class Forgetful(OrderLog):
    """Forgets to wait for one kind of event."""

    def __init__(self, event: str) -> None:
        super().__init__()
        self.forgotten = event

    def wait(self, event: str) -> None:
        if not event.startswith(self.forgotten):
            super().wait(event)


@pytest.mark.parametrize("event", ["fork", "prefetched"])
def test_a_step_that_forgets_to_wait_is_found(event: str) -> None:
    with pytest.raises(OrderError):
        decode(Forgetful(event))
