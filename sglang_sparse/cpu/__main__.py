"""Prints the CPU environment as shell commands: ``eval "$(python -m sglang_sparse.cpu)"``."""

import shlex
import sys

from . import environment

variables = environment()
if not variables:
    print("this host has a CUDA device: nothing to set", file=sys.stderr)
for name, value in variables.items():
    print(f"export {name}={shlex.quote(value)}")
