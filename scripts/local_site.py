"""Makes the checkout visible to a Python that nothing may be installed into, and prints the folder for PYTHONPATH.

SGLang finds plugins through the metadata of installed distributions. The folder holds links to the two packages and
this metadata, nothing else: with the checkout itself on PYTHONPATH its folders ``tests``, ``benchmarks`` and
``kernels`` would become importable too.

    export PYTHONPATH=$(python3 scripts/local_site.py):$PYTHONPATH
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
PACKAGES = {"sglang_sparse": ROOT / "sglang_sparse", "sparse_kernels": ROOT / "kernels" / "sparse_kernels"}


def is_current(name: str, files: dict[str, str]) -> bool:
    if not SITE.is_dir() or {entry.name for entry in SITE.iterdir()} != {name, *PACKAGES}:
        return False
    linked = all((SITE / package).resolve() == folder for package, folder in PACKAGES.items())
    return linked and all(
        (SITE / name / file).is_file() and (SITE / name / file).read_text() == text for file, text in files.items()
    )


def make() -> Path:
    # Read by pattern: Python 3.10 has no TOML parser of its own.
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    entry_points = re.search(r'^\[project\.entry-points\."(.+)"\]\n((?:.+ = .+\n)+)', project, re.MULTILINE)
    if version is None or entry_points is None:
        raise SystemExit("error: pyproject.toml has no version or no entry points")
    name = f"sglang_sparse-{version[1]}.dist-info"
    entries = entry_points[2].replace('"', "")
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: sglang-sparse\nVersion: {version[1]}\n",
        "entry_points.txt": f"[{entry_points[1]}]\n{entries}",
    }
    # Left as it is when nothing changed, since another process may be using it.
    if not is_current(name, files):
        shutil.rmtree(SITE, ignore_errors=True)
        (SITE / name).mkdir(parents=True)
        for package, folder in PACKAGES.items():
            (SITE / package).symlink_to(folder)
        for file, text in files.items():
            (SITE / name / file).write_text(text)
    return SITE


if __name__ == "__main__":
    print(make())
