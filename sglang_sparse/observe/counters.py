"""Counters of what decode steps read, kept on the device so that captured steps can add to them."""

from __future__ import annotations

import dataclasses

import torch
from sparse_kernels.step_totals import FIELDS, step_totals

from sglang_sparse.geometry import Geometry


@dataclasses.dataclass(frozen=True)
class Reading:
    """What was read over some steps. Shares are of everything that dense decode would have read."""

    steps: int
    kept_fraction: float | None
    """Blocks read ÷ all blocks; None before the first step."""
    bytes_read_fraction: float | None
    """(Bytes scanned to choose + KV bytes read) ÷ all KV bytes; None before the first step."""
    kept_by_layer_and_head: list[list[float]]
    tokens: int = 0
    """Of all requests of all steps: what the share of bytes weighs steps by."""
    blocks: int = 0
    """The same for the share of blocks."""


class DecodeCounters:
    """Totals since the start.

    Args:
        sparse_layers: layers whose rules add to `kept_blocks`; the others read everything.
        scan_bytes: bytes a token of a closed page that the estimator reads per layer and KV head.
        min_context: requests below it are not scanned.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        layers: int,
        sparse_layers: list[int],
        scan_bytes: float,
        min_context: int,
        device: torch.device | str,
    ) -> None:
        self._geometry = geometry
        self._scan_bytes = scan_bytes
        self._sparse_layers = sparse_layers
        self._min_context = min_context
        # One tensor, so that a reading is one copy: the step's totals, then kept blocks per layer and KV head.
        self._totals_size = len(FIELDS)
        self._shape = (layers, geometry.kv_heads)
        self._counts = torch.zeros(self._totals_size + layers * geometry.kv_heads, dtype=torch.int64, device=device)
        self.kept_blocks = self._counts[self._totals_size :].view(self._shape)
        """`[layers, Hkv]` int64, increased by the rules."""
        self._marked = torch.zeros_like(self._counts)
        self._last = torch.zeros_like(self._counts, device="cpu")
        self._copy = torch.zeros_like(self._counts, device="cpu", pin_memory=self._counts.is_cuda)
        self._copied: torch.cuda.Event | None = None

    def count_step(self, seq_lens: torch.Tensor) -> None:
        """Adds one decode step over `seq_lens` (`[B]` int32, 0 for padded rows)."""
        step_totals(
            seq_lens,
            page_size=self._geometry.page_size,
            block_size=self._geometry.block_size,
            min_context=self._min_context,
            totals=self._counts[: self._totals_size],
        )

    def mark(self) -> None:
        """Makes `read_since_mark` count from here on, in the device's order."""
        self._marked.copy_(self._counts)

    def read_since_mark(self) -> Reading:
        """Totals since the last `mark`, or since the start. Waits for the device."""
        return self._reading((self._counts - self._marked).cpu())

    def read(self) -> Reading:
        """Totals since the start. Waits for the device."""
        return self._reading(self._counts.cpu())

    def read_recent(self) -> Reading:
        """Totals between the last two calls but one, without waiting for the device: the log line's window."""
        if self._copied is None or self._copied.query():
            now = self._copy.clone()
            recent, self._last = now - self._last, now
        else:
            recent = torch.zeros_like(self._last)
        self._copy.copy_(self._counts, non_blocking=True)
        if self._counts.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._reading(recent)

    def _reading(self, counts: torch.Tensor) -> Reading:
        totals = dict(zip(FIELDS, counts[: self._totals_size].tolist(), strict=True))
        kept = counts[self._totals_size :].view(self._shape).clone()
        dense = [layer for layer in range(self._shape[0]) if layer not in self._sparse_layers]
        kept[dense] = totals["blocks"]
        if not totals["blocks"]:
            return Reading(totals["steps"], None, None, [])
        g = self._geometry
        rows = self._shape[0] * self._shape[1]
        scanned_rows = len(self._sparse_layers) * self._shape[1]
        scanned = scanned_rows * (totals["closed_tokens"] * self._scan_bytes + totals["open_tokens"] * g.kv_bytes / 2)
        kept_fraction = kept.sum().item() / (rows * totals["blocks"])
        return Reading(
            totals["steps"],
            kept_fraction,
            kept_fraction + scanned / (rows * totals["tokens"] * g.kv_bytes),
            (kept.double() / totals["blocks"]).tolist(),
            totals["tokens"],
            totals["blocks"],
        )
