"""The live audit: now and then, the true coverage of the blocks that a decode step chose.

A sampled step is tapped in one layer for one request: the rule's kernel copies its lists and the queries aside. Before
anything overwrites the keys that the step saw, all of them are read once, and the share of the attention mass that lay
in the chosen blocks is computed. Output is never changed, and between steps the host never waits for the device.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sparse_kernels import block_mass_exact

from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.observe.coverage_history import CoverageHistory
from sglang_sparse.selection.coverage import head_coverage


class CoverageAudit:
    """Samples decode steps and keeps what it finds.

    Requests shorter than the minimum context read everything: samples that meet one are dropped, as are those of rows
    whose masses are not finite. Requests with a coverage of their own are not sampled, nor are steps while sparse
    decode is switched off.

    Args:
        step: a decode step with a tap.
        key_pool: gives a layer's keys, `[slots, Hkv, D]`.
        scales: factor of the attention scores, by layer.
        generator: chooses steps, layers and requests; by default one of its own.
    """

    def __init__(
        self,
        step: DecodeStep,
        *,
        key_pool: Callable[[int], torch.Tensor],
        scales: Sequence[float],
        generator: random.Random | None = None,
    ) -> None:
        assert step.tap is not None
        self._step = step
        self._tap = step.tap
        self._key_pool = key_pool
        self._scales = scales
        self._random = generator or random.Random()
        self._is_armed = False
        self._pending: tuple[int, int] | None = None
        self._arriving: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()
        aims = step.rule.name == "coverage"
        self._history = CoverageHistory(step.control.gamma_of if aims else None, step.options.gamma_name)

        # Own buffers, so that no launch differs in alignment from the first: Triton would compile it anew.
        g, table = step.geometry, step.buffers.page_table
        self._page_table = torch.zeros_like(table[:1])
        shape = (1, g.kv_heads, g.group_size, table.shape[1] * g.blocks_per_page)
        self._log_mass = torch.zeros(shape, dtype=torch.float32, device=table.device)
        # Compiles the kernels now, over no tokens, and not while a request waits.
        self._measure(step.sparse_layers[0], 0)

    def before_step(self, requests: int) -> None:
        """To be called before each decode step, before `buffers.load`; `requests` does not count padded rows."""
        self.finish()
        rows = self._step.control.audited_rows(requests)
        if rows and self._random.random() < self._step.control.audit_rate:
            self._pending = self._random.choice(self._step.sparse_layers), rows[self._random.randrange(len(rows))]
            self._tap.arm(*self._pending)
            self._is_armed = True
        elif self._is_armed:
            self._tap.disarm()
            self._is_armed = False

    def finish(self) -> None:
        """Measures the last step if it was sampled. To be called before anything writes keys or loads a step."""
        if self._pending is not None:
            layer, row = self._pending
            self._pending = None
            coverage = self._measure(layer, row)
            copy = torch.empty(coverage.shape, dtype=coverage.dtype, pin_memory=coverage.is_cuda)
            copy.copy_(coverage, non_blocking=True)
            event = None
            if coverage.is_cuda:
                event = torch.cuda.Event()
                event.record()
            self._arriving.append((layer, copy, event))
        self._collect()

    def take_unread(self) -> list[tuple[int, list[float]]]:
        """Layer and coverage of each KV head of the samples that arrived since the last call."""
        return self._history.take_unread()

    def settle(self) -> None:
        """Waits for the samples that are on their way. To be called when the server falls idle, not between steps."""
        for _, _, event in self._arriving:
            if event is not None:
                event.synchronize()
        self._collect()

    def report(self) -> dict[str, Any]:
        """The `audit` block of `/server_info`; JSON types only. Does not wait for samples that are on their way."""
        self._collect()
        return {"rate": self._step.control.audit_rate, **self._history.report()}

    def _collect(self) -> None:
        while self._arriving and (self._arriving[0][2] is None or self._arriving[0][2].query()):
            layer, coverage, _ = self._arriving.popleft()
            self._history.add(layer, coverage.tolist())

    def _measure(self, layer: int, row: int) -> torch.Tensor:
        """True coverage of what was tapped: `[Hkv]` fp32, NaN for requests that select nothing."""
        g, options, tap = self._step.geometry, self._step.options, self._tap
        shortest = max(1, options.min_context)
        self._page_table.copy_(self._step.buffers.page_table[row : row + 1])
        block_mass_exact(
            tap.q[None],
            self._key_pool(layer),
            self._page_table,
            tap.seq_len,
            scale=self._scales[layer],
            page_size=g.page_size,
            block_size=g.block_size,
            min_context=shortest,
            out=self._log_mass,
        )
        by_query_head = head_coverage(
            self._log_mass, tap.seq_len, tap.block_lists[None], tap.block_counts[None], g.block_size
        )[0]
        coverage = by_query_head.mean(-1) if options.group == "average" else by_query_head.amin(-1)
        return torch.where(tap.seq_len >= shortest, coverage, float("nan"))
