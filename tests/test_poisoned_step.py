"""A decode step reads nothing that nobody wrote: memory that is not initialised holds whatever was there before.

The same steps run twice: once in clean memory, once where all that a step must not read holds NaN or numbers far out of
range. That is every place of the KV pool without a token, the summaries of pages that are not full, and before each
step all its buffers and workspaces.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_decode_step import DEVICE, FUSED, LAYERS, OPTIONS, Simulation, lengths

from sglang_sparse.options import SparseDecodeOptions

# Of Triton's interpreter, which computes in numpy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

KEPT_OVER_STEPS = ("thresholds", "block_counts")
"""Buffers that hold settings, and counts: those of layers without lists are 0 from the start."""
INTERPRETED = [
    {"gamma": 0.9},
    {"rule": "top-k", "top_k": 0.3, "estimator": "minmax"},
    FUSED[0],
]
"""What is also run by the kernels, in Triton's interpreter."""


def tensors(holder: Any) -> Iterator[torch.Tensor]:
    """All tensors of an object and of the dataclasses in it."""
    for name, value in vars(holder).items():
        if isinstance(value, torch.Tensor) and name not in KEPT_OVER_STEPS:
            yield value
        elif dataclasses.is_dataclass(value):
            yield from tensors(value)


def poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(0xA5 if tensor.dtype == torch.uint8 else 2**30 + 7)


class Poisoned(Simulation):
    """A simulation whose memory holds nothing but poison beside its tokens and the summaries of full pages."""

    def __init__(self, lengths: list[int], options: SparseDecodeOptions, device: str) -> None:
        super().__init__(lengths, options, device)
        self.clean = [pool.clone() for pool in self.pools]
        for pool in self.pools:
            poison(pool)
        for layer in self.step.sparse_layers:
            for tensor in self.step.summaries._tensors(layer):
                poison(tensor)
        for row, length in enumerate(lengths):
            slots = self.req_to_token[row + 1, :length].long()
            self._write(slots)
            closed = slots[: length // 32 * 32 : 32] // 32
            for layer in range(LAYERS):
                self.step.summaries.update(layer, *self.pools[layer], closed)

    def _write(self, slots: torch.Tensor) -> None:
        for pool, clean in zip(self.pools, self.clean, strict=True):
            pool[:, slots] = clean[:, slots]

    def load(self, rows: list[int]) -> None:
        for tensor in tensors(self.step.buffers):
            poison(tensor)
        for layer in self.step.sparse_layers:
            poison(self.step.buffers.block_counts[layer])
        if self.step.fused:
            for tensor in tensors(self.step.fused.workspace):
                poison(tensor)
        for row in rows:
            self._write(self.req_to_token[row + 1, self.lengths[row]].long())
        super().load(rows)


def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the step run its kernels on a CPU too."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sparse_kernels.") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda impl, tensor: True)


def compare(options: SparseDecodeOptions, sizes: list[int], steps: list[list[int]]) -> None:
    clean, poisoned = Simulation(sizes[:], options, DEVICE), Poisoned(sizes[:], options, DEVICE)
    for number, rows in enumerate(steps):
        q = clean.queries(number)
        padded = [row for row in range(len(clean.lengths)) if row not in rows]
        outs = []
        for simulation in (clean, poisoned):
            asked = q.clone()
            if simulation is poisoned:
                asked[:, padded] = float("nan")
            out = torch.full_like(q, float("nan"))
            simulation.load(rows)
            simulation.attend(asked, out)
            outs.append(out)
        assert not outs[0].isnan().any()
        assert torch.equal(*outs)
        totals = [simulation.step.buffers.request_totals[rows] for simulation in (clean, poisoned)]
        assert torch.equal(*totals)
    assert torch.equal(clean.step.counters._counts, poisoned.step.counters._counts)
    for row, length in enumerate(poisoned.lengths):
        pages = poisoned.req_to_token[row + 1, : length // 32 * 32 : 32].long() // 32
        for layer in range(LAYERS):
            assert poisoned.step.summaries.stale_pages(layer, *poisoned.pools[layer], pages) == 0


def make_options(changes: dict) -> SparseDecodeOptions:
    return SparseDecodeOptions(**{"min_context": 0, "sink_tokens": 4, "window_tokens": 16, **changes})


@pytest.mark.parametrize("changes", [*OPTIONS, *FUSED], ids=str)
def test_a_step_reads_nothing_that_nobody_wrote(changes: dict) -> None:
    steps = [[row for row in range(4) if (number + row) % 5] for number in range(34)]
    compare(make_options(changes), lengths(), steps)


@pytest.mark.skipif(DEVICE == "cuda", reason="the test above runs the kernels there")
@pytest.mark.parametrize("changes", INTERPRETED, ids=str)
def test_neither_do_its_kernels(changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels(monkeypatch)
    # The row of 31 tokens closes a page in the first step.
    compare(make_options(changes), [1, 31, 140], [[0, 1, 2], [1]])
