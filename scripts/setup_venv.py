"""Makes the virtual environment of ``make serve`` and ``make test``, or leaves it as it is when nothing changed.

    setup_venv.py FOLDER

Without a CUDA device it holds the versions of requirements/cpu.lock, with one the extras ``gpu``, ``eval`` and
``dev``; in both cases the project itself is installed editable. Runs on the standard library alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from progress import Progress

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
STAMP = ".sglang-sparse-stamp"
PYTHONS = ((3, 11), (3, 12))


class SetupError(Exception):
    """A step failed; the text says which and what to do."""


def has_cuda_device() -> bool:
    """Whether the driver sees a device; torch may not be installed yet, so it cannot be asked."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listing = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def pip_install(python: Path, what: str, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off", *arguments]
    lines: list[str] = []
    with (
        Progress(what) as progress,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.append(line.rstrip())
            if not line.startswith("WARNING"):
                # Long wheel addresses and folders hide what is being fetched.
                progress.note(re.sub(r"(https?|file)://\S*/|(?<=\s)/\S*/", "", line))
    if pip.returncode != 0:
        told = [line for line in lines if "error" in line.lower()] or lines
        print("\n".join(told[-15:]), file=sys.stderr)
        raise SetupError(f"{what} failed: {' '.join(command)}")


def locked_version(name: str) -> str:
    found = re.search(rf"^{re.escape(name)}==(\S+)$", LOCK.read_text(), re.MULTILINE)
    if found is None:
        raise SetupError(f"{LOCK.name} has no version of {name}")
    return found.group(1)


def install_cpu(python: Path) -> None:
    pip_install(python, f"Installing the packages of {LOCK.name}", "--no-deps", "-r", str(LOCK))
    if subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False).returncode == 0:
        return
    print("pip chose a CUDA build of torch, which needs the CUDA libraries too (several GB).")
    print("README.md tells how to get the much smaller CPU build instead.")
    pip_install(python, "Installing the CUDA libraries", f"torch=={locked_version('torch')}")
    # That may have changed the version of what torch shares with others, such as Triton.
    pip_install(python, f"Restoring the versions of {LOCK.name}", "--no-deps", "-r", str(LOCK))


def install_project(python: Path, kind: str) -> None:
    if kind == "cuda":
        pip_install(python, "Installing SGLang for CUDA and sglang-sparse", "-e", ".[gpu,eval,dev]", "gguf")
    else:
        pip_install(python, "Installing sglang-sparse", "--no-deps", "--no-build-isolation", "-e", ".")


def make_venv(folder: Path) -> None:
    """Makes ``folder`` anew when the lock or the interpreter changed; installs the project again when only that did."""
    kind = "cuda" if has_cuda_device() else "cpu"
    packages = digest(kind.encode(), sys.version.encode(), LOCK.read_bytes(), Path(__file__).read_bytes())
    project = digest(str(ROOT).encode(), (ROOT / "pyproject.toml").read_bytes())
    stamp = folder / STAMP
    found = stamp.read_text().split() if stamp.is_file() else []
    if found == [packages, project]:
        return
    # Not resolved: the interpreter knows its environment by the path of this link.
    python = Path(os.path.abspath(folder)) / "bin" / "python"
    if found[:1] != [packages]:
        create(folder, kind)
        if kind == "cpu":
            install_cpu(python)
    stamp.write_text(packages)
    install_project(python, kind)
    stamp.write_text(f"{packages}\n{project}\n")


def create(folder: Path, kind: str) -> None:
    low, high = PYTHONS
    if kind == "cpu" and not low <= sys.version_info[:2] <= high:
        raise SetupError(
            f"Python {sys.version_info.major}.{sys.version_info.minor} does not fit {LOCK.name}, which is for "
            f"{low[0]}.{low[1]} and {high[0]}.{high[1]}: name another one, as in make PYTHON=python3.12 serve"
        )
    if folder.exists() and not (folder / "pyvenv.cfg").is_file() and any(folder.iterdir()):
        raise SetupError(f"{folder} is not a virtual environment and not empty: name another folder with VENV=")
    with Progress(f"Making the virtual environment {folder}"):
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(folder)], capture_output=True, text=True, check=False
        )
    if made.returncode != 0:
        raise SetupError(f"{sys.executable} -m venv failed: {(made.stdout + made.stderr).strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    try:
        make_venv(parser.parse_args().folder)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
