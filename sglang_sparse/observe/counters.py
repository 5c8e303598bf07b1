"""Counters of what decode steps read, kept on the device so that captured steps can add to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from sparse_kernels.step_totals import FIELDS, step_totals

from sglang_sparse.geometry import Geometry

T = TypeVar("T")

_NEVER = 2**31 - 1
"""A minimum context that no request reaches."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """What was read over some steps. Shares are of everything that dense decode would have read."""

    steps: int
    kept_fraction: float | None
    """Blocks read ÷ all blocks; None before the first step."""
    bytes_read_fraction: float | None
    """(Bytes scanned to choose + KV bytes read) ÷ all KV bytes; None before the first step."""
    kept_by_layer_and_head: list[list[float]]
    """Nothing for layers with a sliding window."""
    tokens: int = 0
    """Of all requests of all steps: what the share of bytes weighs steps by."""
    blocks: int = 0
    """The same for the share of blocks."""
    requests: int = 0
    """Of all steps: each got one token."""
    scanned_steps: int = 0
    """Steps in which at least one request reached the minimum context."""
    kv_bytes_by_layer: float = 0.0
    """What dense decode would have read in each layer."""
    scan_bytes_by_layer: list[float] = dataclasses.field(default_factory=list)
    """Bytes of summaries and of open pages' keys that were read to choose."""
    block_share: float = 1.0
    """Bytes that attention reads of a block ÷ its key and value bytes in the model's dtype."""


class DecodeCounters:
    """Totals since the start.

    Args:
        sparse_layers: layers whose rules add to `kept_blocks`; the others read everything.
        windows: layers with a sliding window, which do not count.
        scan_bytes: bytes a token of a closed page that the estimator reads per layer and KV head.
        min_context: requests below it are not scanned.
        read_bytes: bytes that attention reads of a token of a block; None for those in the model's dtype.
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
        read_bytes: float | None = None,
        windows: frozenset[int] = frozenset(),
    ) -> None:
        self._geometry = geometry
        self._block_share = 1.0 if read_bytes is None else read_bytes / geometry.kv_bytes
        self._scan_bytes = scan_bytes
        self._sparse_layers = sparse_layers
        self._windows = windows
        self._min_context = min_context
        # One tensor, so that a reading is one copy: totals of steps that may select, totals of dense steps, then kept
        # blocks per layer and KV head.
        self._totals_size = 2 * len(FIELDS)
        self._shape = (layers, geometry.kv_heads)
        self._counts = torch.zeros(self._totals_size + layers * geometry.kv_heads, dtype=torch.int64, device=device)
        self.kept_blocks = self._counts[self._totals_size :].view(self._shape)
        """`[layers, Hkv]` int64, increased by the rules; without those of dense steps, in which there is no rule."""
        self._marked = torch.zeros_like(self._counts)
        self._log_window = self.window()

    def count_step(self, seq_lens: torch.Tensor, dense: bool = False) -> None:
        """Adds one decode step over `seq_lens` (`[B]` int32, 0 for padded rows); a dense one scans nothing."""
        first = len(FIELDS) if dense else 0
        step_totals(
            seq_lens,
            page_size=self._geometry.page_size,
            block_size=self._geometry.block_size,
            min_context=_NEVER if dense else self._min_context,
            totals=self._counts[first : first + len(FIELDS)],
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
        """The log line's window; see `CounterWindow.read`."""
        return self._log_window.read()

    def window(self) -> CounterWindow[Reading]:
        """A reader of what happens between its own calls."""
        return CounterWindow(self._counts, self._reading)

    def _reading(self, counts: torch.Tensor) -> Reading:
        by_kind = counts[: self._totals_size].view(2, len(FIELDS))
        totals, of_dense = (dict(zip(FIELDS, row.tolist(), strict=True)) for row in (by_kind.sum(0), by_kind[1]))
        kept = counts[self._totals_size :].view(self._shape) + of_dense["blocks"]
        dense = [layer for layer in range(self._shape[0]) if layer not in self._sparse_layers]
        kept[dense] = totals["blocks"]
        if not totals["blocks"]:
            return Reading(totals["steps"], None, None, [])
        g = self._geometry
        heads = self._shape[1]
        full = [layer for layer in range(self._shape[0]) if layer not in self._windows]
        kept_fraction = kept[full].sum().item() / (len(full) * heads * totals["blocks"])
        shares = (kept.double() / totals["blocks"]).tolist()
        kv_bytes = heads * totals["tokens"] * g.kv_bytes
        scan_bytes = heads * (totals["closed_tokens"] * self._scan_bytes + totals["open_tokens"] * g.kv_bytes / 2)
        return Reading(
            totals["steps"],
            kept_fraction,
            kept_fraction * self._block_share + len(self._sparse_layers) * scan_bytes / (len(full) * kv_bytes),
            [[] if layer in self._windows else row for layer, row in enumerate(shares)],
            totals["tokens"],
            totals["blocks"],
            totals["requests"],
            totals["scanned_steps"] if self._sparse_layers else 0,
            kv_bytes,
            [scan_bytes if layer in self._sparse_layers else 0.0 for layer in range(self._shape[0])],
            self._block_share,
        )


class CounterWindow(Generic[T]):
    """Reads counters again and again; each reading is of what was added since the one before.

    Args:
        counts: `[n]` int64, only ever added to.
        as_reading: makes a reading of a difference of counts, on the host.
    """

    def __init__(self, counts: torch.Tensor, as_reading: Callable[[torch.Tensor], T]) -> None:
        self._counts = counts
        self._as_reading = as_reading
        self._last = torch.zeros_like(counts, device="cpu")
        self._copy = torch.zeros_like(counts, device="cpu", pin_memory=counts.is_cuda)
        self._copied: torch.cuda.Event | None = None

    def read(self) -> T:
        """Totals between the last two calls but one, without waiting for the device."""
        if self._copied is None or self._copied.query():
            now = self._copy.clone()
            recent, self._last = now - self._last, now
        else:
            recent = torch.zeros_like(self._last)
        self._copy.copy_(self._counts, non_blocking=True)
        if self._counts.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._as_reading(recent)

    def read_all(self) -> T:
        """Everything that earlier calls have not returned. Waits for the device."""
        now = self._counts.cpu().clone()
        recent, self._last = now - self._last, now
        # A copy still on its way holds no more than this one: the next reading must not go back to it.
        self._copy.copy_(now)
        self._copied = None
        return self._as_reading(recent)
