"""Other implementations of decode attention, timed in the same run as ours.

Each module has `why_missing()`, one line that says why the peer cannot run here or an empty text, and `prepare`, which
makes its calls for one input set. Nothing of a peer is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from benchmarks.errors import BenchmarkError

DENSE = ("fa3", "triton", "sdpa")
"""Peers that read all blocks."""
SPARSE = ("flashinfer-paged", "flashinfer-variable")
"""Peers that read lists of blocks."""
NAMES = (*DENSE, *SPARSE)

_MODULES = {
    "fa3": "fa3",
    "triton": "sglang_triton",
    "sdpa": "sdpa",
    "flashinfer-paged": "flashinfer_paged",
    "flashinfer-variable": "flashinfer_variable",
}


class PeerError(Exception):
    """A peer cannot serve a case, in one line."""


@dataclass(frozen=True)
class AttentionInputs:
    """What attention of one step takes; shapes as in docs/architecture.md.

    `lists` are block lists `[B, Hkv, N]` and counts `[B, Hkv]`; None reads all blocks.
    """

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    page_size: int
    block_size: int
    lists: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def kv_heads(self) -> int:
        return self.k_pool.shape[1]

    @property
    def group_size(self) -> int:
        return self.q.shape[1] // self.kv_heads

    def slots(self) -> torch.Tensor:
        """Pool slots of each request's tokens in order, `[B, max tokens]` int64; those past its length are any."""
        tokens = torch.arange(int(self.seq_lens.max()), device=self.q.device)
        pages = self.page_table[: len(self.seq_lens), tokens // self.page_size].long()
        return pages * self.page_size + tokens % self.page_size


@dataclass(frozen=True)
class PeerCall:
    """One way to time a peer.

    `how`: `graph` is replayed in a CUDA graph; `eager` is launched from Python, with events around it; `host` is wall
    time of the call with the device waited for. `gives_output` is False for what only prepares.
    """

    note: str
    call: Callable[[], torch.Tensor | None]
    how: Literal["graph", "eager", "host"] = "graph"
    gives_output: bool = True


def module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{_MODULES[name]}")


def available(asked: Sequence[str] | None) -> list[str]:
    """The peers to run: those `asked` for, or all that can run here; what is left out is printed, a line each.

    Raises BenchmarkError if one that is asked for is unknown or cannot run.
    """
    for name in asked or ():
        if name not in NAMES:
            raise BenchmarkError(f"--peers {name}: there is no such peer: use some of {', '.join(NAMES)}, or none")
        if module(name).why_missing():
            raise BenchmarkError(f"--peers {name}: {module(name).why_missing()}: install it, or leave the peer out")
    if asked is not None:
        return list(asked)
    chosen = []
    for name in NAMES:
        reason = module(name).why_missing()
        if reason:
            print(f"peer {name}: {reason}: left out")
        else:
            chosen.append(name)
    return chosen


def import_problem(*names: str) -> str:
    """Why one of the modules cannot be imported, in one line; empty if all can."""
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed"
        except Exception as error:  # of several kinds, where no fitting GPU or CUDA library is found
            return f"{name} cannot be imported ({' '.join(str(error).split())[:200] or type(error).__name__})"
    return ""
