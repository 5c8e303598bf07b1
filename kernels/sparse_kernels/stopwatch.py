"""Times parts of a decode step on the device itself, so that the parts of a captured step can be told apart.

CUDA events cannot be read inside a graph that is replayed: a one-thread kernel that reads the GPU's clock can.
"""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ._dispatch import use_triton

START = -1
"""The phase that begins a measurement instead of ending one."""


@triton.jit
def _stopwatch_kernel(seq_lens, state, PHASE: tl.constexpr):
    now = globaltimer()
    if tl.load(seq_lens) > 0:
        if PHASE < 0:
            tl.store(state + 1, tl.load(state + 1) + 1)
        else:
            tl.store(state + 2 + PHASE, tl.load(state + 2 + PHASE) + now - tl.load(state))
        tl.store(state, now)


def stopwatch_state(phases: int, device: torch.device | str) -> torch.Tensor:
    """A stopwatch that has not run: `[2 + phases]` int64: time of the last lap, starts, nanoseconds of each phase."""
    return torch.zeros(2 + phases, dtype=torch.int64, device=device)


def stopwatch(seq_lens: torch.Tensor, state: torch.Tensor, *, phase: int, impl: str = "auto") -> None:
    """Adds the time since the last lap to `phase`, or starts.

    A step of padded rows alone, as in warm-up, leaves `state` as it is.

    Args:
        seq_lens: `[>=1]` int32; the first row is padded (0) only if all are.
        state: from `stopwatch_state`.
        phase: index of the phase that ends now, or `START`. Phases may alternate: each lap adds.

    Raises:
        ValueError: if `state` has another shape or type, or there is no such phase.
    """
    if state.ndim != 1 or state.dtype != torch.int64 or state.shape[0] < 3:
        raise ValueError(f"state is {state.dtype} {tuple(state.shape)}: use stopwatch_state")
    if not START <= phase < state.shape[0] - 2:
        raise ValueError(f"phase is {phase}: give START or 0 to {state.shape[0] - 3}")
    if not use_triton(impl, seq_lens):
        return stopwatch_reference(seq_lens, state, phase=phase)
    _stopwatch_kernel[(1,)](seq_lens, state, PHASE=phase, num_warps=1)


def stopwatch_reference(seq_lens: torch.Tensor, state: torch.Tensor, *, phase: int) -> None:
    """`stopwatch` by the host's clock, for tensors on the CPU, whose operations have ended when they return."""
    if int(seq_lens[0]) == 0:
        return
    now = time.perf_counter_ns()
    if phase == START:
        state[1] += 1
    else:
        state[2 + phase] += now - int(state[0])
    state[0] = now
