"""Large pinned host memory: taken at start, with progress, and given back whole if it cannot be had."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sglang_sparse.offload.errors import OffloadError
from sglang_sparse.offload.limits import locked_limit

logger = logging.getLogger(__name__)

CHUNK = 1 << 30
"""Bytes that are pinned at a time."""

PROGRESS_SECONDS = 5.0

GIB = 1 << 30


class CudaRegistrar:
    """Pins pages that exist already, by `cudaHostRegister`.

    torch's own pinned allocator rounds sizes up to a power of two, which for 96 GiB would be 32 GiB too many.
    """

    def register(self, address: int, size: int) -> None:
        """Raises RuntimeError with CUDA's reason."""
        runtime: Any = torch.cuda.cudart()
        status = runtime.cudaHostRegister(address, size, 0)
        if int(status) != 0:
            raise RuntimeError(str(runtime.cudaGetErrorString(status)))

    def unregister(self, address: int) -> None:
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(address)


class HostMemory:
    """`size` bytes of zeroed host memory in one range of addresses; pinned if a registrar is given.

    Args:
        size: bytes, above 0.
        flag: that asked for it, for messages.
        registrar: what pins; None for plain memory, as on a CPU.
        progress: called with a line every few seconds.

    Raises:
        OffloadError: the memory cannot be had or pinned; nothing of it is held then.
    """

    def __init__(
        self,
        size: int,
        *,
        flag: str,
        registrar: CudaRegistrar | None = None,
        progress: Callable[[str], None] = logger.info,
    ) -> None:
        self.size = size
        self._registrar = registrar
        self._registered: list[int] = []
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise OffloadError(
                f"{flag}: {size / GIB:.1f} GiB of host memory cannot be had ({error}): ask for less"
            ) from None
        self._view: ctypes.Array | None = (ctypes.c_char * size).from_buffer(self._map)
        self.address = ctypes.addressof(self._view)
        self._finalizer = weakref.finalize(self, _unregister, registrar, self._registered)
        if registrar is None:
            return
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        try:
            self._pin(flag, progress)
        except BaseException:
            self.close()
            raise

    def _pin(self, flag: str, progress: Callable[[str], None]) -> None:
        assert self._registrar is not None
        started = reported = time.perf_counter()
        workers = min(8, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as pool:
            for first in range(0, self.size, CHUNK):
                size = min(CHUNK, self.size - first)
                # Pages are made by several threads: the driver alone would make them one after another.
                share = -(-size // workers)
                parts = [(first + at, min(share, size - at)) for at in range(0, size, share)]
                list(pool.map(lambda part: ctypes.memset(self.address + part[0], 0, part[1]), parts))
                try:
                    self._registrar.register(self.address + first, size)
                except RuntimeError as error:
                    locked = locked_limit()
                    hint = "" if locked is None else f"; ulimit -l is {locked / GIB:.3f} GiB"
                    raise OffloadError(
                        f"{flag}: {first / GIB:.1f} of {self.size / GIB:.1f} GiB could be pinned, and no more "
                        f"({error}{hint}): ask for less; all of it is free again"
                    ) from None
                self._registered.append(self.address + first)
                now = time.perf_counter()
                done = first + size
                if now - reported >= PROGRESS_SECONDS or done == self.size:
                    reported = now
                    rate = done / GIB / max(now - started, 1e-9)
                    progress(f"pinned {done / GIB:.1f} of {self.size / GIB:.1f} GiB, {rate:.1f} GiB/s")

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All of the memory as a tensor, which must not be used after `close`."""
        return torch.frombuffer(self._map, dtype=torch.uint8).view(dtype).view(shape)

    def close(self) -> None:
        """Unpins the memory and gives it back. Tensors of it keep the pages, unpinned, until they are gone."""
        self._finalizer()
        self._view = None
        with contextlib.suppress(BufferError):
            self._map.close()


def _unregister(registrar: CudaRegistrar | None, registered: list[int]) -> None:
    while registrar is not None and registered:
        registrar.unregister(registered.pop())
