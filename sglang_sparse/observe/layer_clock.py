"""Where the time of a decode step goes: one layer of every step is timed, inside the captured graph.

The layer stands for its like: it is the one in the middle of the sparse layers. Timing all of them would cost four
launches each; this costs five in a step.
"""

from __future__ import annotations

import torch
from sparse_kernels import stopwatch, stopwatch_state
from sparse_kernels.stopwatch import START

PHASES = ("estimate", "rule", "attention", "rest")
"""`estimate` includes the summaries of pages that closed, `attention` its combine and the tail; `rest` lasts until the
next layer's attention: projections, norms, MLP and the writing of keys and values."""

ESTIMATE, RULE, ATTENTION, _REST = range(len(PHASES))


def layer_to_time(sparse_layers: list[int], layers: int) -> int | None:
    """The layer in the middle of the sparse ones that have a layer after them; None if there is none."""
    candidates = [layer for layer in sparse_layers if layer + 1 < layers]
    return candidates[len(candidates) // 2] if candidates else None


class LayerClock:
    """Times the phases of one layer. Steps call it from every layer; it launches nothing in the others.

    Args:
        layer: the layer to time, not the last one.
        seq_lens: the step's lengths, as `DecodeBuffers.seq_lens`.
    """

    def __init__(self, layer: int, seq_lens: torch.Tensor) -> None:
        self.layer = layer
        self._seq_lens = seq_lens
        self.state = stopwatch_state(len(PHASES), seq_lens.device)

    def enter(self, layer: int) -> None:
        """A layer's attention begins."""
        if layer == self.layer:
            stopwatch(self._seq_lens, self.state, phase=START)
        elif layer == self.layer + 1:
            stopwatch(self._seq_lens, self.state, phase=_REST)

    def end(self, layer: int, phase: int) -> None:
        """A phase of a layer ends: `ESTIMATE`, `RULE` or `ATTENTION`."""
        if layer == self.layer:
            stopwatch(self._seq_lens, self.state, phase=phase)
