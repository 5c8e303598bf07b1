"""Clusters of thread blocks for Triton's interpreter, which runs the programs of a grid one after another."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from sparse_kernels import _cluster_exchange, _cluster_search, _select_cluster
from triton.runtime.interpreter import TensorHandle, interpreter_builder


class Clusters:
    """Runs the programs of a grid in clusters, in the interpreter: in threads of which one runs at a time, up to its
    next exchange."""

    def __init__(self, program: Callable[..., None]) -> None:
        self.program = program

    def run(self, arguments: dict[str, Any]) -> None:
        """In place of the interpreted kernel, which the interpreter calls for one program after another."""
        self.size = int(arguments["K"])
        self.first = interpreter_builder.grid_idx[0]
        if self.first % self.size != 0:
            return
        self.memory: list[np.ndarray] = []
        self.batons = [threading.Semaphore(0) for _ in range(self.size)]
        self.exchanges = [0] * self.size
        self.ended: list[BaseException | None] = []
        threads = [threading.Thread(target=self._run_one, args=(k, arguments), daemon=True) for k in range(self.size)]
        for thread in threads:
            thread.start()
        self.batons[0].release()
        for thread in threads:
            thread.join()
        for error in self.ended:
            if error is not None:
                raise error

    def _run_one(self, k: int, arguments: dict[str, Any]) -> None:
        error: BaseException | None = None
        try:
            self._await_turn(k)
            self.program(**arguments)
        except BaseException as raised:
            error = raised
        self.ended.append(error)
        self.batons[(k + 1) % self.size].release()

    def _await_turn(self, k: int) -> None:
        self.batons[k].acquire()
        self.running = k
        interpreter_builder.set_grid_idx(self.first + k, 0, 0)

    def exchange(self, mine: Any, buffer: Any, number: Any, K: Any, MOST: Any) -> Any:
        """In place of `_cluster_exchange.exchange`, with the same addresses."""
        k, size, words = self.running, self.size, mine.shape[0]
        most = int(getattr(MOST, "value", MOST))
        turn = number.handle.data.item() if isinstance(number, tl.tensor) else int(getattr(number, "value", number))
        if not self.memory:
            self.memory = [np.zeros(2 * size * most, np.int64) for _ in range(size)]
        half = turn % 2 * size * most
        for memory in self.memory:
            memory[half + k * words : half + (k + 1) * words] = mine.handle.data
        self.exchanges[k] += 1
        self.batons[(k + 1) % size].release()
        self._await_turn(k)
        assert min(self.exchanges) >= self.exchanges[k], "a program of the cluster ended before the others met"
        got = self.memory[k][half : half + size * words].reshape(size, words).copy()
        return tl.tensor(TensorHandle(got, tl.int64), tl.block_type(tl.int64, [size, words]))


def simulate_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the kernel of `_select_cluster` runs in clusters in the interpreter."""
    kernel = _select_cluster._select_cluster_kernel
    made = Clusters(kernel.rewrite())

    def run(**arguments: Any) -> None:
        made.run(arguments)

    # By these the interpreter knows the arguments.
    run.__annotations__ = made.program.__annotations__
    run.__signature__ = inspect.signature(made.program)  # type: ignore[attr-defined]
    monkeypatch.setitem(kernel.rewritten_fn, kernel.fn, run)
    for module in (_cluster_exchange, _cluster_search):
        monkeypatch.setattr(module, "exchange", made.exchange)
    monkeypatch.setattr(_select_cluster, "announce_start", lambda: None)
    monkeypatch.setattr(_select_cluster, "await_start", lambda: None)
    monkeypatch.setattr(_select_cluster, "exchange_buffer", lambda K, T: 0)
