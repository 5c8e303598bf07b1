"""Which implementation of an operation runs, and how large a self-planned grid is."""

import functools
import os

import torch

IMPLS = ("auto", "triton", "torch")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
"""True when Triton kernels run in Triton's interpreter. Read once: `triton.jit` decides at decoration as well."""

_INTERPRETED_PROGRAMS = 3


def use_triton(impl: str, tensor: torch.Tensor) -> bool:
    """Resolves `impl` for an operation whose inputs live where `tensor` does.

    Args:
        impl: `auto` (Triton on CUDA, torch elsewhere), `triton` or `torch`.
        tensor: any input of the operation.

    Returns:
        True for the Triton kernel, False for the torch reference.

    Raises:
        ValueError: unknown `impl`, or `triton` for CPU tensors without `TRITON_INTERPRET=1`.
    """
    if impl == "auto":
        return tensor.is_cuda
    if impl == "torch":
        return False
    if impl == "triton":
        if not tensor.is_cuda and not INTERPRETED:
            raise ValueError(f"impl='triton' on a {tensor.device} tensor needs TRITON_INTERPRET=1 set before import")
        return True
    raise ValueError(f"impl is {impl!r}; allowed: {', '.join(IMPLS)}")


@functools.cache
def multiprocessors(index: int | None) -> int:
    """Streaming multiprocessors of a CUDA device; of the current one if `index` is None."""
    device = torch.cuda.current_device() if index is None else index
    return torch.cuda.get_device_properties(device).multi_processor_count


def planned_programs(tensor: torch.Tensor, per_multiprocessor: int, kv_heads: int) -> int:
    """Grid size of a self-planned kernel: a constant of the device, so that a CUDA graph can hold it.

    Args:
        tensor: any input of the operation.
        per_multiprocessor: programs for each streaming multiprocessor, at most.
        kv_heads: each gets the same number of programs, at least one.

    Returns:
        The number of programs; a few for each KV head in the interpreter.
    """
    if not tensor.is_cuda:
        return _INTERPRETED_PROGRAMS * kv_heads
    return max(multiprocessors(tensor.device.index) * per_multiprocessor // kv_heads, 1) * kv_heads
