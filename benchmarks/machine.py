"""What a benchmark ran on: GPU, versions, commit. And what stops it when something is missing."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from .errors import BenchmarkError

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "sglang", "sgl-kernel", "sglang-kernel", "flashinfer-python")


def require_cuda() -> None:
    """Raises BenchmarkError without a CUDA device, or without torch."""
    try:
        import torch
    except ImportError:
        raise BenchmarkError("torch is not installed: nothing was measured") from None
    if not torch.cuda.is_available():
        raise BenchmarkError("no CUDA device: nothing was measured")


def require_package(name: str) -> None:
    """Raises BenchmarkError unless the module `name` can be found."""
    import importlib.util

    if importlib.util.find_spec(name) is None:
        raise BenchmarkError(f"{name} is not installed: nothing was measured")


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def versions() -> str:
    """Versions of what was measured with, such as `torch 2.11.0+cu130, triton 3.6.0, driver 580.1`."""
    found = [f"python {sys.version.split()[0]}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver:
        found.append(f"driver {driver.splitlines()[0]}")
    return ", ".join(found)


def commit() -> str:
    """The commit of this checkout, with `-dirty` if tracked files differ from it.

    Where git cannot tell, as in a copy without its repository, what `BENCHMARK_COMMIT` says, or else `unknown`.
    """
    head = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if not head:
        return os.environ.get("BENCHMARK_COMMIT") or "unknown"
    # Rows are appended by the very runs that they describe: that changes nothing that was measured.
    changed = _output(
        "git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results.csv"
    )
    return head + ("-dirty" if changed else "")


def _output(*command: str) -> str:
    """Standard output of a command, stripped; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
