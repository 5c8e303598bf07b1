"""What a training run depends on, how far it is, and the checkpoint that holds both."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_sparse.files import write_bytes

from .errors import ForecastError
from .heads_file import Heads
from .model_parts import Identity

FIT = "fit"
"""Training starts from the least-squares fit to the next layer's queries; else from that layer's own projection."""


@dataclass(frozen=True)
class Recipe:
    """What a training run depends on, beside model and data; a checkpoint is only taken up under the same one."""

    steps: int
    batch: int
    queries: int
    vectors: int
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    clip: float
    top: float
    gamma: float
    block: int
    sink: int
    window: int
    evaluate_every: int
    seed: int
    data: str
    """Fingerprint of the sequences."""
    dtype: str
    start: str = FIT
    fit_sequences: int = 16


@dataclass
class Progress:
    """What has been seen so far."""

    step: int
    losses: list[float]
    """Of each step, mean over layers."""
    layer_losses: dict[int, list[float]]
    recalls: list[tuple[int, float, dict[int, float]]]
    """Step, mean over layers, and by layer: on the sequence that is held out."""


def write_checkpoint(
    path: Path,
    recipe: Recipe,
    identity: Identity,
    heads: Heads,
    optimiser: torch.optim.Optimizer,
    progress: Progress,
) -> None:
    """Writes all that a run needs to go on, whole or not at all."""
    state = {
        "about": _about(recipe, identity),
        "heads": {layer: [t.detach() if t is not None else None for t in pair] for layer, pair in heads.items()},
        "optimiser": optimiser.state_dict(),
        "progress": asdict(progress),
    }
    content = io.BytesIO()
    torch.save(state, content)
    write_bytes(path, content.getvalue())


def read_checkpoint(
    path: Path,
    recipe: Recipe,
    identity: Identity,
    heads: Heads,
    optimiser: torch.optim.Optimizer,
    device: torch.device,
) -> Progress:
    """Puts heads and optimiser into the state of a checkpoint, and returns how far it was.

    Raises ForecastError if the file is none, or of another recipe or model.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        _check_same(path, state["about"], _about(recipe, identity))
        with torch.no_grad():
            for layer, pair in heads.items():
                for tensor, kept in zip(pair, state["heads"][layer], strict=True):
                    if tensor is not None:
                        tensor.copy_(kept)
        optimiser.load_state_dict(state["optimiser"])
        return Progress(**state["progress"])
    except ForecastError:
        raise
    except Exception as error:  # unpicklers have errors of their own
        raise ForecastError(
            f"{path} is no checkpoint of this command ({' '.join(str(error).split())[:120]}): remove it to train from "
            "the start"
        ) from None


def _about(recipe: Recipe, identity: Identity) -> dict[str, Any]:
    return asdict(recipe) | asdict(identity)


def _check_same(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if before.get(name) != value:
            raise ForecastError(
                f"{path} is a checkpoint of another run, of {name} {before.get(name)} and not {value}: remove it to "
                "train from the start"
            )
