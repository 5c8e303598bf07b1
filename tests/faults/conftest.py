"""Fault tests use the modules that start servers."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "server")]

# Small tensors: more threads than one only get in each other's way.
if not torch.cuda.is_available():
    torch.set_num_threads(1)
