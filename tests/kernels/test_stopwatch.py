"""The stopwatch: phases add up, rows of padding are not timed; on a GPU, inside a captured graph too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sparse_kernels import stopwatch, stopwatch_state
from sparse_kernels.stopwatch import START


def lengths(first: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([first, 0], dtype=torch.int32, device=device)


def test_laps_add_to_their_phases() -> None:
    state = stopwatch_state(2, "cpu")
    begin = time.perf_counter_ns()
    for _ in range(2):
        stopwatch(lengths(5), state, phase=START)
        for phase, seconds in ((0, 0.01), (1, 0.03), (0, 0.01)):
            time.sleep(seconds)
            stopwatch(lengths(5), state, phase=phase)
    _, starts, first, second = state.tolist()
    assert starts == 2
    assert first >= 40e6
    assert second >= 60e6
    assert first + second <= time.perf_counter_ns() - begin


def test_padding_is_not_timed() -> None:
    state = stopwatch_state(1, "cpu")
    for phase in (START, 0):
        stopwatch(lengths(0), state, phase=phase)
    assert state.tolist() == [0, 0, 0]


@pytest.mark.parametrize("phase", [-2, 2])
def test_refuses_other_phases(phase: int) -> None:
    with pytest.raises(ValueError, match=f"phase is {phase}: give START or 0 to 1"):
        stopwatch(lengths(1), stopwatch_state(2, "cpu"), phase=phase)


@pytest.mark.parametrize("state", [torch.zeros(4), torch.zeros(2, dtype=torch.int64)])
def test_refuses_other_states(state: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="use stopwatch_state"):
        stopwatch(lengths(1), state, phase=0)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sparse_kernels.stopwatch import _stopwatch_kernel

for phase in (-1, 2):
    signature = {"seq_lens": "*i32", "state": "*i64", "PHASE": "constexpr"}
    source = ASTSource(fn=_stopwatch_kernel, signature=signature, constexprs={"PHASE": phase})
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"])
"""


def test_the_kernel_compiles_for_hopper_and_reads_its_clock(tmp_path: Path) -> None:
    """The interpreter has no GPU clock, so this is what a machine without a GPU can say about the kernel."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("%globaltimer") == 2


@pytest.mark.gpu
def test_times_what_a_captured_graph_does() -> None:
    """One phase sleeps ten times as long as the other; both times agree with events around the replays."""
    state, seq_lens = stopwatch_state(2, "cuda"), lengths(5, "cuda")

    def step() -> None:
        stopwatch(seq_lens, state, phase=START)
        torch.cuda._sleep(100_000)
        stopwatch(seq_lens, state, phase=0)
        torch.cuda._sleep(1_000_000)
        stopwatch(seq_lens, state, phase=1)

    seq_lens.zero_()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert state.tolist() == [0, 0, 0, 0]
    seq_lens[0] = 5
    graph.replay()
    state.zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    _, starts, short, long = state.tolist()
    assert starts == 20
    assert 7 < long / short < 11
    assert 0.9 < (short + long) / 1e6 / begin.elapsed_time(end) <= 1.02
