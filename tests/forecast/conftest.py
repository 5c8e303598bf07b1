"""Small tensors: more threads than one only get in each other's way."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    torch.set_num_threads(1)

sys.path.insert(0, str(Path(__file__).parent))
