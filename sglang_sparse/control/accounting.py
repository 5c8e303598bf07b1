"""What each request read, in the scheduler process: counted with each decode step, sent with the finished request.

A step leaves its counts in a static buffer. They are copied to the host behind the step, before the next one replaces
them, and added when SGLang processes the step's results: then it is known which requests the step counted for.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from sglang_sparse.control.request import KEY

_ATTRIBUTE = "sparse_decode_usage"
"""Attribute of SGLang's requests: kept blocks and blocks so far. It stays when a request is retracted and resumed."""


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """Counts of one step on their way to the host: `[B, 2]` int64, kept blocks and blocks of each request."""

    values: torch.Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def copy(cls, totals: torch.Tensor, requests: int, stream: Any = None) -> StepCounts:
        """Copies the first `requests` rows of `totals` without waiting for the device.

        `stream` is a context of the stream that the step runs on; None for the current one.
        """
        if not totals.is_cuda:
            return cls(totals[:requests].clone(), None)
        with stream or contextlib.nullcontext():
            values = torch.empty((requests, totals.shape[1]), dtype=totals.dtype, pin_memory=True)
            values.copy_(totals[:requests], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return cls(values, copied)

    def add_to(self, requests: Sequence[Any]) -> None:
        """Adds to each of SGLang's requests what it read, once the copy has arrived.

        Under overlap scheduling a step also ran for requests that the step before it finished: those are left out, as
        their tokens are.
        """
        if self.copied is not None:
            self.copied.synchronize()
        for request, (kept, blocks) in zip(requests, self.values.tolist(), strict=True):
            if request.finished() or request.is_retracted:
                continue
            before = getattr(request, _ATTRIBUTE, (0, 0))
            setattr(request, _ATTRIBUTE, (before[0] + kept, before[1] + blocks))


class _Final(list):
    """One value that any slice repeats.

    SGLang sends a request's additional information in slices, one entry a token, and streams take slices of those
    again. This one value belongs to the end of the request, so each slice must have it as its last entry.
    """

    def __getitem__(self, key: Any) -> Any:
        return list(self) if isinstance(key, slice) else super().__getitem__(key)


def publish(request: Any, ranks: int = 1) -> None:
    """Puts what a finished request read among the information that SGLang sends with its last output, if it decoded.

    Of `ranks` that share the attention heads, the first one sends what its own heads read; their number goes with it.
    """
    usage = getattr(request, _ATTRIBUTE, None)
    if usage is None:
        return
    # Longer than the output: what was sent before is cut off by length.
    entry = [*usage] if ranks == 1 else [*usage, ranks]
    value = _Final([entry] * (len(request.output_ids) + 1))
    request.customized_info = (request.customized_info or {}) | {KEY: value}
