from __future__ import annotations

import gc

import pytest
import torch

from sglang_sparse.offload import pinned
from sglang_sparse.offload.errors import OffloadError
from sglang_sparse.offload.pinned import HostMemory


class Registrar:
    """Counts what is pinned; refuses more than `limit` bytes, as a driver may."""

    def __init__(self, limit: int = 2**62) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}

    def register(self, address: int, size: int) -> None:
        if sum(self.held.values()) + size > self.limit:
            raise RuntimeError("out of memory")
        self.held[address] = size

    def unregister(self, address: int) -> None:
        del self.held[address]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "CHUNK", 1 << 16)
    monkeypatch.setattr(pinned, "PROGRESS_SECONDS", 0.0)


def test_all_of_it_is_pinned_in_chunks_with_progress() -> None:
    registrar, lines = Registrar(), []
    memory = HostMemory(3 * (1 << 16) + 4096, flag="--f", registrar=registrar, progress=lines.append)
    assert sorted(registrar.held.items()) == [
        (memory.address + at, min(1 << 16, memory.size - at)) for at in range(0, memory.size, 1 << 16)
    ]
    assert len(lines) == 4
    assert lines[-1].startswith("pinned 0.0 of 0.0 GiB, ")
    tensor = memory.tensor((memory.size // 4,), torch.float32)
    assert tensor.data_ptr() == memory.address
    assert (tensor == 0).all()
    tensor[-1] = 3
    del tensor
    memory.close()
    assert registrar.held == {}
    memory.close()


def test_what_fails_half_way_frees_what_it_took() -> None:
    registrar = Registrar(limit=2 * (1 << 16))
    with pytest.raises(OffloadError, match=r"--f: 0.0 of 0.0 GiB could be pinned, and no more \(out of memory"):
        HostMemory(3 * (1 << 16), flag="--f", registrar=registrar)
    assert registrar.held == {}


def test_memory_that_nobody_holds_is_unpinned() -> None:
    registrar = Registrar()
    memory = HostMemory(1 << 17, flag="--f", registrar=registrar)
    assert len(registrar.held) == 2
    del memory
    gc.collect()
    assert registrar.held == {}


def test_more_than_the_address_space_is_refused() -> None:
    with pytest.raises(OffloadError, match=r"--f: .* GiB of host memory cannot be had"):
        HostMemory(1 << 60, flag="--f")


def test_plain_memory_takes_no_time_to_get() -> None:
    """On a CPU nothing is touched before it is used."""
    memory = HostMemory(1 << 34, flag="--f")
    tensor = memory.tensor((1 << 34,), torch.uint8)
    tensor[1 << 33] = 1
    assert int(tensor[(1 << 33) - 1 : (1 << 33) + 2].sum()) == 1


@pytest.mark.gpu
def test_pinned_memory_is_read_by_kernels_across_chunks() -> None:
    from sparse_kernels import block_gather

    memory = HostMemory(4 << 16, flag="--f", registrar=pinned.CudaRegistrar())
    source = memory.tensor((64, 1024), torch.int32)
    source.copy_(torch.arange(64 * 1024, dtype=torch.int32).view(64, 1024))
    target = torch.zeros(64, 1024, dtype=torch.int32, device="cuda")
    index = torch.arange(64, dtype=torch.int32, device="cuda")
    block_gather(source, target, index, index, torch.full((1,), 64, dtype=torch.int32, device="cuda"))
    assert torch.equal(target.cpu(), source)
