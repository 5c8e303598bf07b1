"""What must hold whatever requests do: random lives in a pool of few pages, shrunk to the shortest that fails."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from world import World

from sglang_sparse.offload.ordering import OrderLog


class Lives(RuleBasedStateMachine):
    """Attention equals that of pools which hold everything, in every step (`World.check_attention`), for any number of
    slots and any forecast; and between steps the maps, slots and host pool agree."""

    world: World

    @initialize(
        slots=st.tuples(st.sampled_from([0, 1, 3, 8, 40]), st.sampled_from([0, 2, 5, 40])),
        pages=st.integers(4, 10),
        seed=st.integers(0, 2**16),
        installs=st.booleans(),
        float8=st.booleans(),
    )
    def begin(self, slots: tuple[int, int], pages: int, seed: int, installs: bool, float8: bool) -> None:
        self.world = World(slots, pages, seed, streams=OrderLog(), installs=installs, float8=float8)

    @rule(tokens=st.integers(1, 40), prefix=st.none() | st.integers(0, 5))
    def start(self, tokens: int, prefix: int | None) -> None:
        self.world.start(tokens, prefix)

    @rule(
        density=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
        forecast=st.none() | st.sampled_from([0.0, 0.4, 1.0]),
        padding=st.integers(0, 2),
        times=st.integers(1, 6),
    )
    def decode(self, density: float, forecast: float | None, padding: int, times: int) -> None:
        for _ in range(times):
            self.world.decode(density, forecast, padding)

    @precondition(lambda self: self.world.requests)
    @rule(index=st.integers(0, 5), keep=st.booleans(), unseen=st.integers(0, 1))
    def end(self, index: int, keep: bool, unseen: int) -> None:
        self.world.end(index, keep, unseen)

    @rule()
    def flush(self) -> None:
        self.world.tree.clear()

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
