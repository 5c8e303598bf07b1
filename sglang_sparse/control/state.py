"""What a running server decodes with: thresholds on the device that change between steps, never within one.

Rules read their thresholds from a static buffer, inside captured graphs too, so that nothing is captured anew. A
threshold of infinity makes a rule keep all blocks: that is how a request, or the server, decodes densely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sglang_sparse.control.request import KEEP_ALL
from sglang_sparse.control.values import Change
from sglang_sparse.options import SparseDecodeOptions

_NONE = float("nan")
"""Stands for "as the server" among the thresholds of requests."""


class DecodeControl:
    """Current settings, and the thresholds that they give in a step.

    Args:
        thresholds: `[layers, max_requests, Hkv]` fp32: what rules read, one row for each request of a batch. Holds what
            the options ask for.
        on_change: called when a change takes effect, before the first step with it.
        first_kv_head: which of the model's KV heads the first of `thresholds` is.
    """

    def __init__(
        self,
        options: SparseDecodeOptions,
        thresholds: torch.Tensor,
        on_change: Callable[[], None] = lambda: None,
        first_kv_head: int = 0,
    ) -> None:
        self.enabled = True
        self.audit_rate = options.audit_rate
        self.gamma: float | None = None
        """One gamma for all layers and KV heads instead of those of the options."""
        self.delta: float | None = None
        """One delta for all layers and KV heads instead of that of the options."""
        self._options = options
        self._thresholds = thresholds
        self._first_kv_head = first_kv_head
        self._started = thresholds[:, :1].clone()
        self._base = self._started
        self._on_change = on_change
        self._pending: dict[str, Any] = {}
        self._requests: tuple[float | None, ...] = ()
        self._longest: int | None = None
        self._loaded: tuple[float | None, ...] = ()
        """Thresholds of requests that the buffer holds, less those at the end that are None."""

    def change(self, changes: Mapping[str, Change]) -> None:
        """Notes checked changes; they take effect before the next step."""
        self._pending.update(changes)

    def announce(self, requests: Sequence[float | None], longest: int | None = None) -> None:
        """Says what each request of the next step asks for: a threshold, or None for what the server asks for.

        None of them has more than `longest` tokens; None if that is not known.
        """
        self._requests = tuple(requests)
        self._longest = longest

    def before_step(self) -> None:
        """Puts changes and the announced requests' thresholds in place. To be called on the stream of the step.

        Does nothing on the device unless something differs from the last step.
        """
        if self._pending:
            for name, value in self._pending.items():
                setattr(self, name, value)
            self._pending = {}
            self._write_base()
            self._on_change()
        wanted = self._requests if self.enabled else ()
        while wanted and wanted[-1] is None:
            wanted = wanted[:-1]
        if wanted != self._loaded:
            self._write_rows(wanted, max(len(wanted), len(self._loaded)))

    def audited_rows(self, requests: int) -> Sequence[int]:
        """Rows of the step, out of `requests`, that are decoded as the server asks for: the audit samples those."""
        if not self.enabled:
            return ()
        own = self._requests[:requests]
        if not any(threshold is not None for threshold in own):
            return range(requests)
        return [row for row in range(requests) if row >= len(own) or own[row] is None]

    @property
    def may_select(self) -> bool:
        """Whether a request of the announced step may leave blocks out. To be asked after `before_step`."""
        if not self.enabled:
            return False
        if self._longest is not None and self._longest < self._options.min_context:
            return False
        return not self._requests or any(threshold != KEEP_ALL for threshold in self._requests)

    @property
    def is_waiting(self) -> bool:
        """Whether there are changes that no step has seen yet."""
        return bool(self._pending)

    def gamma_of(self, layer: int) -> float:
        """The coverage asked for in a layer; the mean over the KV heads of this rank if they differ."""
        if self.gamma is not None:
            return self.gamma
        gammas = self._options.head_gammas(layer, self._thresholds.shape[2], self._first_kv_head)
        return sum(gammas) / len(gammas)

    def report(self) -> dict[str, Any]:
        """Current settings, those that wait for the next step included; JSON types only."""
        current = {"enabled": self.enabled, "gamma": self.gamma, "delta": self.delta, "audit_rate": self.audit_rate}
        return current | self._pending

    def _write_base(self) -> None:
        if not self.enabled:
            self._base = torch.full_like(self._started, KEEP_ALL)
        else:
            # Only one of them goes with the server's rule.
            own = self.gamma if self.gamma is not None else self.delta
            self._base = self._started if own is None else torch.full_like(self._started, own)
        self._thresholds.copy_(self._base.expand_as(self._thresholds))
        self._loaded = ()

    def _write_rows(self, wanted: tuple[float | None, ...], rows: int) -> None:
        given = [_NONE if threshold is None else threshold for threshold in wanted]
        own = torch.tensor(
            given + [_NONE] * (rows - len(given)), dtype=torch.float32, pin_memory=self._thresholds.is_cuda
        )
        own = own.to(self._thresholds.device, non_blocking=True)[None, :, None]
        self._thresholds[:, :rows] = torch.where(own.isnan(), self._base, own)
        self._loaded = wanted
