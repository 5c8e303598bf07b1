"""How a Triton kernel of single blocks is launched as clusters, and whether that works here.

Triton makes clusters of its own (`num_ctas`): a kernel's tensors are then spread over the blocks of a cluster, and it
does not compile reductions across them. Here each block of a cluster is a program of its own. A kernel is compiled as
usual; a copy of what Triton compiled then says that its clusters have K blocks, in the metadata that Triton's launcher
reads: it multiplies the grid by K, asks the driver for clusters, and allows those of more than 8 blocks. Nothing of
Triton's is changed, and the kernel itself can still be launched without clusters.

None of that metadata is Triton's public interface. So a device takes clusters only after a small kernel, launched this
way, found itself in clusters of the right size and its blocks exchanged values; else everything runs without.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

from ._cluster_exchange import announce_start, await_start, exchange, exchange_buffer, size_of_cluster
from ._dispatch import INTERPRETED

logger = logging.getLogger(__name__)

SIZES = (16, 8)
"""Blocks in a cluster, the largest first. 16 is as many as there can be at compute capability 9.0, and 8 as many as any
device with clusters has to offer."""

_CAPABILITY = (9, 0)
"""The first compute capability with clusters."""

CHECKED_WORDS = 16
_CHECKED_CLUSTERS = 2

_sizes_of_device: dict[int, tuple[int, ...]] = {}
_lock = threading.Lock()
_allowed = True


@functools.cache
def _as_clusters(compiled: Any, size: int) -> Any:
    """A copy of a compiled kernel that is launched as clusters of `size` blocks.

    Raises:
        RuntimeError: Triton's metadata are not as this module knows them.
    """
    metadata = compiled.metadata
    if compiled.packed_metadata != (metadata.num_warps, 1, metadata.shared) or metadata.num_ctas != 1:
        raise RuntimeError(
            f"Triton {triton.__version__} packs the metadata of a launch in a way that is not known here"
        )
    # Loads the kernel, so that the copy shares it.
    assert compiled.run is not None
    clusters = copy.copy(compiled)
    clusters.packed_metadata = (metadata.num_warps, size, metadata.shared)
    return clusters


def launch_clusters(
    kernel: Any, clusters: int, size: int, arguments: Sequence[Any], constants: Mapping[str, Any], **options: Any
) -> None:
    """Launches a kernel as `clusters` clusters of `size` blocks; without clusters if `size` is 1 or if interpreted.

    Args:
        kernel: one that `triton.jit` made; its program ids are those of blocks: `clusters * size` in all.
        arguments: its arguments before the constants.
        constants: its `tl.constexpr` arguments by name.
        options: of the compiler, such as `num_warps`.
    """
    grid = (clusters * size, 1, 1)
    if INTERPRETED or size == 1:
        kernel[grid](*arguments, **constants, **options)
        return
    compiled = kernel.warmup(*arguments, grid=grid, **constants, **options)
    if compiled is None:
        # Something that only compiles has taken Triton over.
        return
    names = list(kernel.signature.parameters)
    bound = {**dict(zip(names, arguments, strict=False)), **constants}
    _as_clusters(compiled, size)[(clusters, 1, 1)](*[bound[name] for name in names])


@triton.jit
def _check_kernel(seen, K: tl.constexpr, T: tl.constexpr):
    """`seen [programs, 2]` int32: the size of the program's cluster, and the sum of its programs' ids, exchanged."""
    program = tl.program_id(0)
    size = size_of_cluster()
    total = tl.zeros((), tl.int32) - 1
    if size == K:
        announce_start()
        await_start()
        buffer = exchange_buffer(K, T)
        for number in range(3):
            ids = exchange(tl.zeros((T,), tl.int64) + program, buffer, number, K, T)
            total = tl.max(tl.sum(ids, 0), 0).to(tl.int32)
    tl.store(seen + program * 2, size)
    tl.store(seen + program * 2 + 1, total)


def _why_not(size: int) -> str:
    """Why kernels are not launched as clusters of `size` blocks on the current device; empty if they are."""
    seen = torch.full((_CHECKED_CLUSTERS * size, 2), -1, dtype=torch.int32, device="cuda")
    try:
        launch_clusters(_check_kernel, _CHECKED_CLUSTERS, size, (seen,), {"K": size, "T": CHECKED_WORDS}, num_warps=8)
        found = seen.tolist()
    except Exception as error:  # whatever another Triton, or a driver, may have against it
        return f"{type(error).__name__}: {error}"
    expected = [
        [size, sum(range(cluster * size, cluster * size + size))]
        for cluster in range(_CHECKED_CLUSTERS)
        for _ in range(size)
    ]
    return "" if found == expected else "a kernel that was launched as clusters did not run so"


def _decide(device: int) -> tuple[int, ...]:
    name = torch.cuda.get_device_name(device)
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < _CAPABILITY:
        logger.info("selection runs without thread block clusters: %s has none", name)
        return ()
    with torch.cuda.device(device):
        reasons = {size: _why_not(size) for size in SIZES}
    sizes = tuple(size for size in SIZES if not reasons[size])
    if sizes:
        logger.info("selection runs in clusters of up to %d thread blocks on %s", sizes[0], name)
    for size in SIZES:
        if reasons[size]:
            logger.info("selection runs without clusters of %d thread blocks on %s: %s", size, name, reasons[size])
    return sizes


def cluster_sizes(device: torch.device) -> tuple[int, ...]:
    """Those of `SIZES` that a device takes. Found out once for each device, which waits for it; until then none while
    the current stream is captured."""
    if INTERPRETED or device.type != "cuda" or not _allowed:
        return ()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _sizes_of_device:
        if torch.cuda.is_current_stream_capturing():
            return ()
        with _lock:
            if index not in _sizes_of_device:
                _sizes_of_device[index] = _decide(index)
    return _sizes_of_device[index]


def prepare_clusters(device: torch.device | str) -> None:
    """Finds out whether a device runs selection rules as clusters of thread blocks, and logs it, so that what is
    captured next can be. Waits for the device; once is enough, and not doing it costs speed only."""
    cluster_sizes(torch.device(device))


@contextmanager
def without_clusters() -> Iterator[None]:
    """While it lasts, nothing chooses clusters: to compare and to time both ways."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before
