from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from random_model import write_random_model

from sglang_sparse.calibrate.replay import Replay


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def replay_on(model_folder: Path) -> Callable[[str], Replay]:
    made: dict[str, Replay] = {}

    def on(device: str) -> Replay:
        if device not in made:
            made[device] = Replay(model_folder, device=device)
        return made[device]

    return on
