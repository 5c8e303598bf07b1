"""Tells an answer that a rounding chose from a wrong one.

Codes of keys and lists of blocks jump: where a key lies on the border of two codes, or the blocks' masses on the border
of what is read, a rounding decides which tokens are read, and another token may be the best by far. Whether an answer
lies on such a border is asked of the quiet server itself: it gets the request alone, on an empty cache and with the
answer's tokens given, while the weights of the model are moved at random by as much as a rounding. A rounding chose the
answer only if with one such draw this server is on the answer's side with *all* of its tokens, twice; if it is steady
with its own weights; and if that draw moves nothing where all blocks are read. Other requests, prefix hits and
retractions have no part in this, so that what they broke does not come again, and away from borders no draw changes a
token.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import soak_server
import torch
from safetensors.torch import load_file, save_file
from soak_forced import MARGIN, Token, force
from soak_part import Part
from soak_plan import Scale

ROUNDING = 2.0 ** (-10 if harness.ON_CUDA else -22)
"""Largest share by which a weight is moved: two roundings, as 16 bits or float32 have them."""
DRAWS = 24
TOKENS_A_BORDER = 100_000
"""Compared tokens for which one more request on a border is allowed."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a rounding chose, and what was found."""

    is_border: bool
    found: str


def too_many(in_round: int, in_all: int, checked_tokens: int) -> list[str]:
    """What is wrong with so many requests that have answers on a border, in a round and since the soak began."""
    allowed = 1 + checked_tokens // TOKENS_A_BORDER
    found = [f"{in_round} requests on a border in one round"] if in_round > 1 else []
    if in_all > allowed:
        found.append(f"{in_all} requests on a border among {checked_tokens} tokens: at most {allowed} are by chance")
    return found


def judge(server: Any, part: Part, tokens: Sequence[Token], scale: Scale) -> Verdict:
    """Judges an answer of which some `tokens`, as they are alone on the quiet server, are apart from the best.

    Leaves the server with the weights that it had.
    """
    apart = [position for position, token in enumerate(tokens) if token.is_apart]
    assert apart, "no token is to be judged"
    if not all(part.selects(position, scale) for position in apart):
        return Verdict(False, "where no blocks were chosen, so that nothing jumps")
    ids = [token.id for token in tokens]
    model = soak_server.model_path(server)
    dense = force(server, part, ids, dense=True)
    try:
        draw, moved_dense = _search(server, part, ids, apart, model)
    finally:
        soak_server.load_weights(server, model)
    if any(force(server, part, ids) != list(tokens) for _ in range(2)):
        return Verdict(False, "and the quiet server is not steady")
    if moved_dense is None:
        return Verdict(False, f"and so with {DRAWS} draws of weights moved by a rounding")
    shift = max(abs(one.behind - other.behind) for one, other in zip(dense, moved_dense, strict=True))
    if shift > MARGIN:
        return Verdict(False, f"but draw {draw} is no rounding: it moves what reads all blocks by {shift:.4f} nats")
    return Verdict(True, f"best with draw {draw} of weights moved by a rounding, which else moves {shift:.5f} nats")


def _search(
    server: Any, part: Part, ids: Sequence[int], apart: Sequence[int], model: Path
) -> tuple[int, list[Token] | None]:
    """The first draw with which the tokens `apart` are the best and no other is apart, and the tokens of that draw
    where all blocks are read."""
    with tempfile.TemporaryDirectory() as folder:
        for draw in range(DRAWS):
            soak_server.load_weights(server, move(model, Path(folder) / "moved", draw))
            moved = force(server, part, ids)
            if any(token.is_apart for token in moved) or not all(moved[position].is_best for position in apart):
                continue
            if force(server, part, ids) == moved:
                return draw, force(server, part, ids, dense=True)
    return DRAWS, None


def move(model: Path, folder: Path, draw: int, share: float = ROUNDING) -> Path:
    """Writes the model into `folder` with each weight moved by at most `share` of it."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(draw)
    weights = {
        name: weight * (1 + share * (2 * torch.rand(weight.shape, generator=generator) - 1))
        for name, weight in load_file(model / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
