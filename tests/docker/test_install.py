"""The steps that make the image's environment, run here as far as they go without a GPU and 8 GB of packages."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from monitoring import ROOT
from registry import skip_if_unreachable

sys.path.insert(0, str(ROOT / "docker"))

import check_install

SCRIPT = ROOT / "docker" / "install.sh"
LOCK = ROOT / "docker" / "requirements.lock"
PINNED = check_install.locked_versions(LOCK.read_text())


def install(*arguments: str | Path, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = inherited | {"PYTHON": sys.executable} | {name: str(value) for name, value in variables.items()}
    command = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def entries() -> list[str]:
    """The lock's requirements, each with its hashes."""
    text = re.sub(r"^#.*\n", "", LOCK.read_text(), flags=re.MULTILINE)
    return [entry for entry in re.split(r"\n(?=\S)", text) if entry.strip()]


def test_the_lock_is_complete_and_hashed() -> None:
    assert len(entries()) == len(PINNED) > 150
    for entry in entries():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]
    assert PINNED["sglang"] == "0.5.17"
    assert PINNED["torch"] == "2.11.0"
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-nvcc", "nvidia-cuda-nvrtc"):
        assert PINNED[name].startswith("13.0."), "a compiler newer than the runtime makes code that it may not load"
    for package in ("sglang-kernel", "flashinfer-python", "triton", "rich", "setuptools"):
        assert package in PINNED


def test_what_was_asked_for_is_in_the_lock() -> None:
    for line in (ROOT / "docker" / "requirements.in").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, wanted = re.fullmatch(r"([\w-]+)(==|>=)?(.*)", line).groups()  # type: ignore[union-attr]
            assert name in PINNED
            if line.count("=="):
                assert PINNED[name].startswith(wanted.rstrip("*"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment made by the image's own steps from one entry of its lock, setuptools."""
    folder = tmp_path_factory.mktemp("image")
    small = folder / "small.lock"
    small.write_text("\n".join(entry for entry in entries() if entry.startswith("setuptools==")) + "\n")
    made = install("packages", folder / "venv", LOCK=small)
    skip_if_unreachable(made.stdout + made.stderr)
    assert made.returncode == 0, made.stderr
    made = install("project", folder / "venv")
    assert made.returncode == 0, made.stderr
    return folder / "venv"


def test_the_environment_has_the_plugin_and_what_the_lock_says(environment: Path) -> None:
    code = """if True:
        import importlib.metadata as metadata, importlib.util
        print(metadata.version("setuptools"))
        print([entry.value for entry in metadata.entry_points(group="sglang.srt.plugins")])
        print([importlib.util.find_spec(name).origin for name in ("sglang_sparse", "sparse_kernels")])
    """
    command = [str(environment / "bin" / "python"), "-c", code]
    out = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True, env={}).stdout.splitlines()
    assert out[0] == PINNED["setuptools"]
    assert out[1] == "['sglang_sparse.plugin:register']"
    assert out[2].count(str(environment)) == 2


def test_a_hash_that_differs_leaves_no_environment(tmp_path: Path) -> None:
    lock = tmp_path / "wrong.lock"
    lock.write_text(f"setuptools=={PINNED['setuptools']} --hash=sha256:{'0' * 64}\n")
    result = install("packages", tmp_path / "venv", LOCK=lock)
    skip_if_unreachable(result.stdout + result.stderr)
    assert result.returncode != 0
    assert "DO NOT MATCH THE HASHES" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_the_check_names_what_is_missing(environment: Path) -> None:
    result = install("check", environment)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    if sys.version_info[:2] == check_install.PYTHON:
        assert re.search(r"error: \S+ \S+ is not installed", result.stderr)
    else:
        assert "it has to be 3.12" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "give a step"),
        (["packages"], {}, "give a step"),
        (["upgrade", "/nowhere"], {}, "'upgrade' is no step"),
        (["packages", "/nowhere"], {"LOCK": "/no/lock"}, "LOCK names no file: /no/lock"),
        (["packages", "/tmp"], {}, "/tmp exists"),
        (["packages", "/nowhere"], {"PYTHON": "python2.1"}, "there is no python2.1"),
        (["project", "/nowhere"], {}, "/nowhere is no environment"),
        (["check", "/nowhere"], {}, "/nowhere is no environment"),
    ],
)
def test_refusals(arguments: list[str], variables: dict[str, str], message: str) -> None:
    result = install(*arguments, **variables)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"install.sh: error: {message}" in result.stderr


def test_versions_are_compared() -> None:
    here = importlib.metadata.version("pytest")
    check_install.check_versions({"pytest": here})
    with pytest.raises(check_install.CheckError, match=rf"pytest is {re.escape(here)}, and the lock file says 1\.0"):
        check_install.check_versions({"pytest": "1.0"})
    with pytest.raises(check_install.CheckError, match="no-such-package 1 is not installed"):
        check_install.check_versions({"no-such-package": "1"})
    with pytest.raises(check_install.CheckError, match="names no package"):
        check_install.locked_versions("# nothing\n")


def test_a_torch_without_cuda_13_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for version in (None, "12.8"):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(check_install.CheckError, match=f"built for CUDA {version}"):
            check_install.check_cuda()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check_install.check_cuda()
