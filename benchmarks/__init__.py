"""Benchmarks of the operations, of the attention step and of real servers: `python -m benchmarks`."""

import importlib.util
import sys
from pathlib import Path

# A checkout that is not installed runs as it is.
if importlib.util.find_spec("sparse_kernels") is None:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
