"""What an SGLang server needs on a host without a GPU.

SGLang runs on a CPU through each layer's native torch path, but imports two things that cannot be installed there: its
kernel library, and a torchvision whose compiled part fits a CPU build of torch. ``stubs`` holds a stand-in for each.
They work by coming first on ``PYTHONPATH``, so that every process that SGLang spawns has them too:

>>> subprocess.Popen([sys.executable, "-m", "sglang.launch_server", ...], env=os.environ | environment())

or, from a shell, ``eval "$(python -m sglang_sparse.cpu)"``; a process that uses SGLang itself calls ``activate``.
On a host with a CUDA device all three do nothing, and a stub steps aside for the real package if that works.
"""

import os
import sys
from pathlib import Path

__all__ = ["SERVER_FLAGS", "STUBS", "activate", "environment"]

STUBS = Path(__file__).resolve().parent / "stubs"

SERVER_FLAGS = (
    "--device",
    "cpu",
    "--mem-fraction-static",
    "0.5",
    "--max-total-tokens",
    "16384",
    "--max-running-requests",
    "16",
    # An idle scheduler would otherwise keep a core busy.
    "--sleep-on-idle",
)
"""Flags of ``sglang.launch_server`` for a small model on a small CPU host."""


def environment() -> dict[str, str]:
    """The environment variables of a CPU server process, to be laid over ``os.environ``; none on a CUDA host."""
    import torch

    if torch.cuda.is_available():
        return {}
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in inherited if entry != str(STUBS)]
    return {
        "PYTHONPATH": os.pathsep.join([str(STUBS), *others]),
        "SGLANG_USE_CPU_ENGINE": "1",
        # Kernel tests run under Triton's interpreter; a server that they start must not inherit it.
        "TRITON_INTERPRET": "0",
    }


def activate() -> bool:
    """Gives this process, and those it starts, the CPU environment; returns whether the host needs it.

    Has to come before the first import of SGLang, transformers or torchvision.
    """
    variables = environment()
    if not variables:
        return False
    late = [name for name in ("sglang", "sgl_kernel", "torchvision") if name in sys.modules]
    if late and str(STUBS) not in sys.path:
        raise RuntimeError(f"sglang_sparse.cpu.activate() has to be called before {late[0]} is imported")
    # Whether this process itself interprets Triton kernels is its own choice.
    del variables["TRITON_INTERPRET"]
    os.environ.update(variables)
    if str(STUBS) not in sys.path:
        sys.path.insert(0, str(STUBS))
    return True
