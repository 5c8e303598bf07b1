"""Servers and models that tests share. Servers live as long as the test module that asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import harness
from random_model import write_random_model


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from harness.servers(tmp_path_factory)


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("random-llama"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The sample model; `SAMPLE_MODEL` names its folder where nothing can be downloaded."""
    if os.environ.get("SAMPLE_MODEL"):
        return Path(os.environ["SAMPLE_MODEL"])
    script = Path(__file__).parents[2] / "scripts" / "sample_model.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip().splitlines()[-1])
