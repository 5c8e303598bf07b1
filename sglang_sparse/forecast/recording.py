"""What real decode steps read, and what a forecast would have known, from a model of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sglang_sparse.calibrate.prompts import Prompt
from sglang_sparse.calibrate.replay import FIRST_SLOT, Replay
from sglang_sparse.calibrate.settings import Setting
from sglang_sparse.selection.coverage import chosen_blocks

from .model_parts import ModelParts


@dataclass(frozen=True)
class Steps:
    """The decode steps of one prompt.

    Attributes:
        inputs: `[layers, T, hidden]`, normed inputs of the query projections.
        kept: `[layers, T, Hkv, N]` bool: blocks of closed pages that the server would read. The page that a step's
            token is in has a place of its own on the GPU and is never fetched.
        candidates: `[T, N]` bool: blocks of closed pages.
        keys: `[layers, N * block, Hkv, D]`.
        positions: `[T]` int64.
    """

    inputs: torch.Tensor
    kept: torch.Tensor
    candidates: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor


@contextlib.contextmanager
def watch_inputs(parts: ModelParts, seen: dict[int, torch.Tensor]) -> Iterator[None]:
    """While open, `seen` gets the input `[1, T, hidden]` of each layer's query projection in a forward pass."""
    handles = []
    for index, layer in enumerate(parts.layers):

        def note(module: Any, arguments: tuple, index: int = index) -> None:
            seen[index] = arguments[0].detach()

        handles.append(layer.attention.q_proj.register_forward_pre_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def record_steps(
    replay: Replay, parts: ModelParts, prompt: Prompt, setting: Setting, steps: int, stop: frozenset[int]
) -> Steps:
    """The next `steps` tokens of a prompt: its own continuation, or dense decode's answer, which may end earlier."""
    prefix = replay.prefill(prompt.tokens, steps)
    tokens = prompt.forced if prompt.forced is not None else replay.decode_densely(prefix, stop)
    tokens = tokens[:steps]
    page, block = setting.page_size, setting.options.block_size
    positions = prefix.length + torch.arange(len(tokens), device=replay.device)
    pages = -(-(prefix.length + len(tokens)) // page)
    blocks = pages * page // block
    candidates = torch.arange(blocks, device=replay.device) < (positions // page * (page // block))[:, None]
    shape = (replay.layers, len(tokens), replay.geometry.kv_heads, blocks)
    kept = torch.zeros(shape, dtype=torch.bool, device=replay.device)

    def note(layer: int, lists: torch.Tensor, counts: torch.Tensor) -> None:
        kept[layer] = chosen_blocks(lists, counts)[..., :blocks]

    seen: dict[int, torch.Tensor] = {}
    with watch_inputs(parts, seen):
        replay.force(prefix, tokens, setting, measure=False, record=note)
    return Steps(
        inputs=torch.stack([seen[layer][0] for layer in range(replay.layers)]),
        kept=kept & candidates[:, None],
        candidates=candidates,
        keys=prefix.k[:, FIRST_SLOT : FIRST_SLOT + pages * page],
        positions=positions,
    )
