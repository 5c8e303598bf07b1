"""How kernels are launched as clusters of thread blocks, and how a device is found to take them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import DEVICE
from sparse_kernels import _cluster_launch, _select_cluster, prepare_clusters


@pytest.mark.gpu
def test_nothing_is_found_out_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cluster_launch, "_sizes_of_device", {})
    device = torch.device(DEVICE)
    seen = torch.zeros(1, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert _cluster_launch.cluster_sizes(device) == ()
        seen += 1
    assert _cluster_launch._sizes_of_device == {}
    prepare_clusters(device)
    assert list(_cluster_launch._sizes_of_device) == [torch.cuda.current_device()]


class Compiled:
    """As much of a kernel that Triton compiled as a launch looks at."""

    def __init__(self, packed: Any, num_ctas: int = 1) -> None:
        self.metadata = SimpleNamespace(num_warps=4, num_ctas=num_ctas, shared=128)
        self.packed_metadata = packed
        self.run = object()


def test_a_copy_of_the_kernel_is_launched_as_clusters() -> None:
    compiled = Compiled((4, 1, 128))
    copied = _cluster_launch._as_clusters(compiled, 8)
    assert copied.packed_metadata == (4, 8, 128)
    assert copied.run is compiled.run
    assert compiled.packed_metadata == (4, 1, 128)
    assert _cluster_launch._as_clusters(compiled, 8) is copied
    assert _cluster_launch._as_clusters(compiled, 16).packed_metadata == (4, 16, 128)


@pytest.mark.parametrize("compiled", [Compiled((4, 1, 128, 0)), Compiled((4, 2, 128), 2), Compiled({"num_ctas": 1})])
def test_unknown_metadata_are_refused(compiled: Compiled) -> None:
    with pytest.raises(RuntimeError, match="not known here"):
        _cluster_launch._as_clusters(compiled, 8)


@pytest.mark.parametrize(
    ("version", "capability", "reasons", "sizes", "said"),
    [
        ("13.0", (9, 0), {}, (16, 8), "in clusters of up to 16 thread blocks on a GPU"),
        ("13.0", (12, 0), {16: "too large"}, (8,), "without clusters of 16 thread blocks on a GPU: too large"),
        ("13.0", (9, 0), {16: "odd", 8: "odd"}, (), "without clusters of 8 thread blocks on a GPU: odd"),
        ("13.0", (8, 9), {}, (), "without thread block clusters: a GPU has none"),
        (None, (9, 4), {}, (), "without thread block clusters: a GPU has none"),
    ],
)
def test_a_device_is_asked_once_and_the_answer_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str | None,
    capability: tuple[int, int],
    reasons: dict[int, str],
    sizes: tuple[int, ...],
    said: str,
) -> None:
    asked = []

    def why_not(size: int) -> str:
        asked.append(size)
        return reasons.get(size, "")

    monkeypatch.setattr(_cluster_launch, "INTERPRETED", False)
    monkeypatch.setattr(_cluster_launch, "_sizes_of_device", {})
    monkeypatch.setattr(_cluster_launch, "_why_not", why_not)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: _cluster_launch.without_clusters())
    with caplog.at_level(logging.INFO, "sparse_kernels"):
        for _ in range(2):
            assert _cluster_launch.cluster_sizes(torch.device("cuda:0")) == sizes
    assert said in caplog.text
    assert len(caplog.records) == len(set(caplog.messages)) <= 2
    assert asked in ([], list(_cluster_launch.SIZES))


def test_no_clusters_without_a_gpu() -> None:
    prepare_clusters("cpu")
    assert _cluster_launch.cluster_sizes(torch.device("cpu")) == ()
    assert _select_cluster.chosen_size(torch.empty(1, 1, 1, 8)) == 1
