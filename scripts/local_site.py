"""Makes the checkout visible to a Python that nothing may be installed into, and prints the folder for PYTHONPATH.

SGLang finds plugins through the metadata of installed distributions. The folder holds links to the two packages and that
metadata, and nothing else: with the checkout itself on PYTHONPATH its folders ``tests``, ``benchmarks`` and ``kernels``
would become importable too.

    export PYTHONPATH=$(python3 scripts/local_site.py):$PYTHONPATH
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
PACKAGES = {"sglang_sparse": ROOT / "sglang_sparse", "sparse_kernels": ROOT / "kernels" / "sparse_kernels"}


def make() -> Path:
    # Read by pattern: Python 3.10 has no TOML parser of its own.
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    entry_points = re.search(r'^\[project\.entry-points\."(.+)"\]\n((?:.+ = .+\n)+)', project, re.MULTILINE)
    if version is None or entry_points is None:
        raise SystemExit("error: pyproject.toml has no version or no entry points")
    shutil.rmtree(SITE, ignore_errors=True)
    metadata = SITE / f"sglang_sparse-{version[1]}.dist-info"
    metadata.mkdir(parents=True)
    for name, package in PACKAGES.items():
        (SITE / name).symlink_to(package)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang-sparse\nVersion: {version[1]}\n")
    entries = entry_points[2].replace('"', "")
    (metadata / "entry_points.txt").write_text(f"[{entry_points[1]}]\n{entries}")
    return SITE


if __name__ == "__main__":
    print(make())
