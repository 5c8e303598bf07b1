"""Every place that lists SGLang releases lists the same ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sparse.sglang_compat import TESTED_RELEASES

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import release_venv
import test_all_sglang
from setup_venv import ROOT, SetupError, locked_version

IN_CI = locked_version("sglang")


def test_tested_releases_are_those_that_tests_run_on() -> None:
    assert (IN_CI, *test_all_sglang.RELEASES) == TESTED_RELEASES
    locks = {path.stem.removeprefix("sglang-") for path in (ROOT / "requirements").glob("sglang-*.lock")}
    assert locks == set(test_all_sglang.RELEASES)


@pytest.mark.parametrize("release", test_all_sglang.RELEASES)
def test_lock_files_are_exact_and_hold_only_what_differs(release: str) -> None:
    lines = [line for line in release_venv.lock(release).read_text().splitlines() if not line.startswith("#")]
    assert f"sglang=={release}" in lines
    for line in lines:
        name, _, version = line.partition("==")
        assert re.fullmatch(r"[\w.]+", version)
        assert locked_version(name) != version


def test_a_release_without_a_lock_file_is_named() -> None:
    with pytest.raises(SetupError, match=r"SGLang 0\.5\.99 has no lock file in requirements: use one of 0\.5\.20, "):
        release_venv.make("0.5.99")


def test_the_command_refuses_other_releases() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "test_all_sglang.py"), "--release", "0.5.99"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "invalid choice: '0.5.99'" in done.stderr


def test_documentation_lists_them() -> None:
    table = (ROOT / "docs" / "compatibility.md").read_text()
    assert tuple(re.findall(r"^\| (0\.5\.\d+) \|", table, re.MULTILINE)) == TESTED_RELEASES
    with_patches = set(re.findall(r"^\| (0\.5\.\d+) \|.*\| yes \|$", table, re.MULTILINE))
    folders = {path.name.removeprefix("sglang-") for path in (ROOT / "patches").glob("sglang-*")}
    assert with_patches == folders
    project = (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r'\["patches/sglang-(\S+?)/\*\.patch"\]', project)) == folders


@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [
        ("print('3 passed in 1.00s')", 0, "3 passed in 1.00s, "),
        ("print('1 failed, 2 passed'); raise SystemExit(1)", 1, "1 failed, 2 passed, "),
        ("import os; print('..', flush=True); os.kill(os.getpid(), 9)", 1, "ended by signal or exit code -9, "),
    ],
)
def test_results_of_all_releases_are_summed_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    code: str,
    expected: int,
    said: str,
) -> None:
    """Stands in for the environments: `python -m pytest` there is this Python with a module of that name."""
    (tmp_path / "pytest.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(test_all_sglang, "has_cuda_device", lambda: False)
    monkeypatch.setattr(release_venv, "make", lambda release: Path(sys.executable))
    monkeypatch.setattr(sys, "argv", ["test_all_sglang.py"])
    assert test_all_sglang.main() == expected
    summary = capfd.readouterr().out.strip().splitlines()[-2:]
    for line, release in zip(summary, test_all_sglang.RELEASES, strict=True):
        assert line.startswith(f"SGLang {release} (Python ")
        assert f"): {said}" in line
