"""The blocks that each decode step keeps, as the server would keep them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_sparse.calibrate.prompts import Prompt
from sglang_sparse.calibrate.replay import Replay
from sglang_sparse.calibrate.settings import Setting


@dataclass(frozen=True)
class BlockTrace:
    """What one request kept under one setting."""

    kept: torch.Tensor
    """`[steps, layers, Hkv, blocks]` bool, on the CPU: blocks of closed pages that are read. The page that the step's
    token is in is left out: it has a place of its own on the GPU and cannot be missed."""
    blocks: torch.Tensor
    """`[steps]`: blocks that the request has, those of the open page included."""

    @property
    def rows(self) -> torch.Tensor:
        """`[steps, layers * Hkv, blocks]`."""
        return self.kept.flatten(1, 2)


def record(replay: Replay, prompt: Prompt, settings: list[Setting], steps: int, stop: frozenset[int]) -> list:
    """A trace of `prompt`'s next `steps` tokens for each setting.

    The tokens are the prompt's own continuation, or dense decode's greedy answer, which may end earlier. They run in
    one pass, in which every token attends sparsely and so sees what sparse steps before it would have written: its
    sets are those of a decode step by step (tests/calibrate/test_replay.py).
    """
    prefix = replay.prefill(prompt.tokens, steps)
    tokens = prompt.forced if prompt.forced is not None else replay.decode_densely(prefix, stop)
    return [_record(replay, prefix, tokens, setting) for setting in settings]


def _record(replay: Replay, prefix, tokens: list[int], setting: Setting) -> BlockTrace:
    page, block = setting.page_size, setting.options.block_size
    lengths = prefix.length + 1 + torch.arange(len(tokens))
    last = int(lengths[-1])
    blocks = -(-last // block)
    closed = (lengths - 1) // page * (page // block)
    kept = torch.zeros((len(tokens), replay.layers, replay.geometry.kv_heads, blocks), dtype=torch.bool)

    def note(layer: int, lists: torch.Tensor, counts: torch.Tensor) -> None:
        width = lists.shape[-1]
        listed = torch.arange(width, device=lists.device) < counts[..., None]
        # Entries beyond the count hold anything: they go to a column of their own.
        mask = torch.zeros((*lists.shape[:2], width + 1), dtype=torch.bool, device=lists.device)
        mask.scatter_(-1, torch.where(listed, lists, width).long(), True)
        kept[:, layer] = mask[..., :blocks].cpu()

    replay.force(prefix, tokens, setting, measure=False, record=note)
    kept &= (torch.arange(blocks) < closed[:, None])[:, None, None]
    return BlockTrace(kept, -(-lengths // block))
