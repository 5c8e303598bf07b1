"""Virtual environments for other SGLang releases, each laid over the packages of the interpreter that runs this.

An environment holds what requirements/sglang-<release>.lock names, and a path file that adds the packages of the
running interpreter after them: torch and the rest, 2.9 GB, are there once. It is left as it is when nothing changed.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

from setup_venv import ROOT, STAMP, SetupError, digest, pip_install

FOLDER = ROOT / "build" / "sglang"
PATH_FILE = "sglang-sparse-base.pth"


def lock(release: str) -> Path:
    """The file with the packages of `release`; SetupError if there is none."""
    path = ROOT / "requirements" / f"sglang-{release}.lock"
    if not path.is_file():
        known = sorted(found.stem.removeprefix("sglang-") for found in path.parent.glob("sglang-*.lock"))
        raise SetupError(f"SGLang {release} has no lock file in requirements: use one of {', '.join(known)}")
    return path


def base_folders() -> list[str]:
    """Folders that hold the packages of this interpreter."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [folder for folder in folders if os.path.isdir(folder)]


def make(release: str) -> Path:
    """The interpreter of the environment for `release`, which is made first unless it is there."""
    packages, folder = lock(release), FOLDER / release
    python = folder / "bin" / "python"
    state = digest(sys.version.encode(), "\n".join(base_folders()).encode(), packages.read_bytes())
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text().strip() == state:
        return python
    # Made anew from nothing: what is half installed has no stamp.
    shutil.rmtree(folder, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise SetupError(f"{sys.executable} -m venv failed: {(made.stdout + made.stderr).strip()}")
    pip_install(python, f"Installing SGLang {release}", "--no-deps", "--ignore-installed", "-r", str(packages))
    # After pip, which would otherwise take the packages below for installed. addsitedir reads their path files too.
    own = next((folder / "lib").glob("python*/site-packages"))
    lines = [f"import site; site.addsitedir({below!r})\n" for below in base_folders()]
    (own / PATH_FILE).write_text("".join(lines))
    stamp.write_text(f"{state}\n")
    return python
