"""Programmatic dependent launch: a kernel is set up while the one before it still runs, and then waits for its end.

Every kernel of a decode step's layer calls `wait_for_previous`, in all of its programs, and is launched with
`dependent_launch`. By the time it returns, all kernels before have ended and what they wrote can be read: the previous
kernel cannot end before it has itself waited. Before it returns, only what was written before the step may be read:
lengths, page tables and thresholds. Devices before Hopper launch one kernel after the other, as usual.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.language.target_info import cuda_capability_geq

from ._dispatch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@functools.cache
def _supported(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def dependent_launch(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel that calls `wait_for_previous`, on the device of `tensor`."""
    return {"launch_pdl": True} if tensor.is_cuda and _supported(tensor.device.index) else {}


@triton.jit
def wait_for_previous():
    """Lets the next kernel be set up, and waits until all kernels before this one have ended."""
    if not _INTERPRETED:  # noqa: SIM102 - conditions of the compiler's
        if cuda_capability_geq(9):
            cuda.gdc_launch_dependents()
            cuda.gdc_wait()
