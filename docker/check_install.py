"""Fails, in one line, unless this interpreter's environment is the one that the image was made for.

    check_install.py LOCK

Needs no GPU: looks at versions, the CUDA that torch was built with, and the plugin's entry point.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

PYTHON = (3, 12)
CUDA = "13."
ENTRY_POINT = ("sglang.srt.plugins", "sparse_decode", "sglang_sparse.plugin:register")


class CheckError(Exception):
    """The environment is not the one that was tested."""


def locked_versions(lock: str) -> dict[str, str]:
    """Package names, as the lock spells them, to versions; of packages that this platform installs."""
    versions = re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*])?==([^\s;\\]+)", lock, re.MULTILINE)
    if not versions:
        raise CheckError("the lock file names no package")
    return dict(versions)


def check_versions(expected: dict[str, str]) -> None:
    """Raises CheckError at the first package that is missing or of another version."""
    for name, version in expected.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise CheckError(f"{name} {version} is not installed") from None
        if found.split("+")[0] != version.split("+")[0]:
            raise CheckError(f"{name} is {found}, and the lock file says {version}")


def check_python() -> None:
    if sys.version_info[:2] != PYTHON:
        raise CheckError(f"Python is {sys.version.split()[0]}: it has to be {'.'.join(map(str, PYTHON))}")


def check_cuda() -> None:
    import torch

    if not (torch.version.cuda or "").startswith(CUDA):
        raise CheckError(f"torch {torch.__version__} is built for CUDA {torch.version.cuda}: it has to be {CUDA}x")


def check_plugin() -> None:
    group, name, value = ENTRY_POINT
    found = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=group)}
    if found.get(name) != value:
        raise CheckError(f"SGLang would not find the plugin: entry points of {group} are {found}")
    import sparse_kernels

    import sglang_sparse

    for package in (sglang_sparse, sparse_kernels):
        if Path(sys.prefix) not in Path(package.__file__ or "").parents:
            raise CheckError(f"{package.__name__} comes from {package.__file__}, not from {sys.prefix}")


def main(arguments: list[str]) -> int:
    try:
        check_python()
        expected = locked_versions(Path(arguments[0]).read_text())
        check_versions(expected)
        check_cuda()
        check_plugin()
    except CheckError as error:
        print(f"check_install.py: error: {error}", file=sys.stderr)
        return 1
    print(f"{len(expected)} packages of the lock file and the plugin are installed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
