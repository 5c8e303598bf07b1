"""Pristine trees of SGLang releases: folders that hold the package as its wheel has it."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from registry import skip_if_unreachable

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "wheels"


def installed_release() -> str:
    return importlib.metadata.version("sglang")


def pristine(release: str, folder: Path) -> Path:
    """`folder` with the package `sglang` of `release` in it; skips the test where the wheel cannot be had."""
    if release == installed_release():
        copy_installed(folder)
    else:
        with zipfile.ZipFile(wheel(release)) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith("sglang/")])
    return folder


def copy_installed(folder: Path) -> None:
    """Copies the installed package, and checks each file against the hash that the wheel gave it."""
    for file in importlib.metadata.distribution("sglang").files or []:
        if file.parts[0] != "sglang" or file.hash is None:
            continue
        source, target = Path(str(file.locate())), folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        digest = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, target.read_bytes()).digest())
        assert digest.decode().rstrip("=") == file.hash.value, f"{source} is not as its wheel has it"


def wheel(release: str) -> Path:
    """The wheel of `release`, from pip and then from build/wheels."""
    found = sorted(WHEELS.glob(f"sglang-{release}-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"sglang=={release}"]
        done = subprocess.run([*command, "--dest", str(WHEELS)], capture_output=True, text=True, check=False)
        found = sorted(WHEELS.glob(f"sglang-{release}-*.whl"))
        if not found:
            skip_if_unreachable(done.stdout + done.stderr)
            pytest.fail(f"pip has no wheel of SGLang {release}: {done.stderr.strip()[-300:]}")
    return found[-1]


def linked_copy(tree: Path, folder: Path) -> Path:
    """A copy of `tree` in which files share their content, as installers make them too: patching must not reach it."""
    return Path(shutil.copytree(tree, folder, copy_function=os.link))
