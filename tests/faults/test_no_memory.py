"""Memory that cannot be had at start: one line with what was asked, what there is and the flag; nothing stays taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse import backend, hook_targets, plugin
from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.offload import backend as offload_backend
from sglang_sparse.offload import budget, pinned
from sglang_sparse.offload.budget import OffloadPoolConfigurator
from sglang_sparse.offload.limits import host_limit
from sglang_sparse.offload.pools import HostPool
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.selection.estimators import ThumbnailEstimator
from sglang_sparse.split import hooks as split_hooks
from sglang_sparse.split import kv_pool as split_kv_pool

GIB = 1 << 30
GEOMETRY = Geometry(kv_heads=2, group_size=2, head_dim=64, dtype=torch.float32, page_size=32, block_size=16)
LAYERS, PAGES = 3, 41
CUDA_SAYS = "CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has 1.00 MiB free."


def line_of(capsys: pytest.CaptureFixture, start: Callable[[], Any]) -> str:
    """The one line with which `start` ends the process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        start()
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("sglang-sparse: error: ")
    return lines[0].removeprefix("sglang-sparse: error: ")


def create_backend(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, build: Callable[[], Any], **options: Any
) -> Any:
    """What `plugin` does when SGLang asks for the backend `name`, whose memory is taken by `build`."""
    monkeypatch.setattr(plugin, "_verify_hooks", lambda _: None)
    monkeypatch.setattr(plugin, "_memory_is_reserved", True)
    monkeypatch.setattr(plugin, "_backend", None)
    monkeypatch.setattr(where, name, lambda model_runner, options: build())
    return lambda: plugin._create_backend(object(), SparseDecodeOptions(**options))


@pytest.mark.parametrize("refused", ["first", "last"])
def test_a_gpu_without_room_for_page_summaries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, refused: str
) -> None:
    options = SparseDecodeOptions()
    allocate, made = ThumbnailEstimator.allocate, []

    def until_full(estimator: Any, pages: int, device: Any) -> Any:
        if device != "meta" and len(made) == (0 if refused == "first" else LAYERS - 1):
            raise torch.OutOfMemoryError(CUDA_SAYS)
        made.append(allocate(estimator, pages, device))
        return made[-1]

    def build() -> DecodeStep:
        return DecodeStep(options, GEOMETRY, layers=LAYERS, pages=PAGES, max_requests=2, max_pages=8, device="cpu")

    size = build().summaries.bytes
    monkeypatch.setattr(ThumbnailEstimator, "allocate", until_full)
    line = line_of(capsys, create_backend(monkeypatch, backend, "SparseDecodeBackend", build))
    assert line == (
        "no memory for page summaries and step buffers: lower --mem-fraction-static (page summaries of 41 pages take "
        f"{size / 1e9:.2f} GB; {' '.join(CUDA_SAYS.split())})"
    )


def test_the_size_of_summaries_is_that_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(pages: int) -> DecodeStep:
        options = SparseDecodeOptions(dense_layers=(0,))
        return DecodeStep(options, GEOMETRY, layers=LAYERS, pages=pages, max_requests=2, max_pages=8, device="cpu")

    size = step(PAGES).summaries.bytes * 2000 / PAGES
    allocate = ThumbnailEstimator.allocate

    def refuse(estimator: Any, pages: int, device: Any) -> Any:
        if device == "meta":
            return allocate(estimator, pages, device)
        raise torch.OutOfMemoryError(CUDA_SAYS)

    monkeypatch.setattr(ThumbnailEstimator, "allocate", refuse)
    with pytest.raises(torch.OutOfMemoryError, match=f"of 2000 pages take {size / 1e9:.2f} GB; CUDA out of memory"):
        step(2000)
    assert size > 1e7


def test_a_gpu_without_room_for_values_beside_split_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError(CUDA_SAYS)

    shape = {"geometry": GEOMETRY, "layers": LAYERS}
    monkeypatch.setattr(
        split_hooks,
        "compat",
        SimpleNamespace(
            cache_shape=lambda owner: shape, pool_arguments=lambda owner: {}, add_chunk_of_whole_pages=None
        ),
    )
    monkeypatch.setattr(split_kv_pool, "SplitKVPool", refuse)
    hooks = split_hooks.SplitHooks(SparseDecodeOptions(kv_format="split"), plugin._stop)
    build = hooks.by_target()[hook_targets.BUILD_KV_POOL]
    line = line_of(capsys, lambda: build(None, object(), max_total_num_tokens=4096))
    assert line.startswith(
        "no memory for the values of 4096 tokens beside split keys: lower --mem-fraction-static (CUDA"
    )


class Inner:
    """SGLang's configurator, as far as it is asked."""

    def calculate_pool_sizes_from_max_tokens(self, tokens: int, page_size: int) -> Any:
        return SimpleNamespace(max_total_num_tokens=tokens)


@pytest.fixture
def small_cgroup(tmp_path: Path) -> Path:
    """The files of a process whose cgroup may have 8 GiB, 3 of them in use."""
    for name, text in {
        "proc/self/cgroup": "0::/box\n",
        "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 33554432 kB\n",
        "sys/fs/cgroup/box/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/box/memory.current": f"{4 * GIB}\n",
        "sys/fs/cgroup/box/memory.stat": f"inactive_file {GIB}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("6", "asks for 6.0 GiB, but the cgroup's memory limit of 8.0 GiB leaves 5.0 GiB: ask for less"),
        ("0.9", "asks for 7.2 GiB, but the cgroup's memory limit of 8.0 GiB leaves 5.0 GiB: ask for less"),
        ("5", None),
    ],
)
def test_host_memory_above_the_cgroups_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, small_cgroup: Path, asked: str, said: str | None
) -> None:
    """Linux would end the server as soon as the pool fills, and not when it is asked for."""
    monkeypatch.setattr(budget, "host_limit", lambda: host_limit(small_cgroup))
    pools = OffloadPoolConfigurator(
        Inner(),
        SparseDecodeOptions(offload=True, host_memory=asked),
        geometry=GEOMETRY,
        layers=LAYERS,
        context=8192,
        max_pages=256,
        max_requests=4,
        on_error=plugin._stop,
    )
    if said is None:
        assert pools.calculate_pool_sizes(20 * GIB, 32).max_total_num_tokens > 10_000
    else:
        line = line_of(capsys, lambda: pools.calculate_pool_sizes(20 * GIB, 32))
        assert line == f"--sparse-decode-host-memory {said}"


class Runtime:
    """CUDA's runtime on a machine that lets pin `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if sum(self.held.values()) + size > self.limit:
            return 2
        self.held[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.held[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return {2: "out of memory"}[status]


@pytest.mark.parametrize("chunks", [0, 3])
def test_pinned_memory_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, chunks: int
) -> None:
    chunk = 1 << 20
    runtime = Runtime(limit=chunks * chunk)
    monkeypatch.setattr(pinned, "CHUNK", chunk)
    monkeypatch.setattr(pinned, "GIB", chunk)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    def build() -> HostPool:
        return HostPool(GEOMETRY, layers=LAYERS, pages=128, device="cuda")

    start = create_backend(monkeypatch, offload_backend, "OffloadDecodeBackend", build, offload=True)
    line = line_of(capsys, start)
    assert line.startswith(
        f"--sparse-decode-host-memory: {chunks}.0 of 12.0 GiB could be pinned, and no more (out of memo"
    )
    assert line.endswith(": ask for less; all of it is free again")
    assert runtime.held == {}
