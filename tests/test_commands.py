"""Files that are run by their path find what they import, wherever they are run from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "path",
    [
        "scripts/sample_model.py",
        "scripts/serve.py",
        "scripts/test_all_sglang.py",
        "tests/soak/soak_run.py",
    ],
)
def test_a_command_shows_its_help_from_another_folder(path: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / path), "--help"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage:" in done.stdout
