"""Layers with a sliding window are SGLang's: the step passes them by, and nothing of them is counted or kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.backend import SparseDecodeBackend
from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.memory import SparsePoolConfigurator, reserve
from sglang_sparse.observe.layer_groups import by_layer_group
from sglang_sparse.options import SparseDecodeOptions

GEOMETRY = Geometry(kv_heads=1, group_size=2, head_dim=64, dtype=torch.float32, page_size=32, block_size=16)
LAYERS, WINDOWS, PAGES = 4, frozenset({0, 3}), 8
OPTIONS = SparseDecodeOptions(gamma=0.5, min_context=32, sink_tokens=16, window_tokens=16, dense_layers=(2,))


def make_step() -> DecodeStep:
    return DecodeStep(
        OPTIONS,
        GEOMETRY,
        layers=LAYERS,
        pages=PAGES,
        max_requests=4,
        max_pages=4,
        device="cpu",
        windows=WINDOWS,
    )


class WindowBackend:
    """Stands in for SGLang's own attention; notes what it is asked."""

    needs_cpu_seq_lens = True

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.calls.append(("state", max_bs, max_num_tokens))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.calls.append(("eager",))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.calls.append(("out", in_capture))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.calls.append(("in",))

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append(("decode", layer.layer_id, kwargs))
        return q + 1


@pytest.fixture
def backend() -> SparseDecodeBackend:
    """The backend of a model whose pools are made here, with three requests of 40, 70 and 33 tokens in it."""
    made = object.__new__(SparseDecodeBackend)
    made.step, made.windows, made.audit, made._layers = make_step(), WINDOWS, None, LAYERS
    made._prefill_backend = SimpleNamespace(closed_pages=None)
    made._req_to_token = torch.zeros(5, 4 * 32, dtype=torch.int32)
    for row, pages in ((1, (1, 2)), (2, (3, 4, 5)), (3, (6, 7))):
        slots = [page * 32 + token for page in pages for token in range(32)]
        made._req_to_token[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    return made


def batch(**more: Any) -> Any:
    lengths = torch.tensor([40, 70, 33, 1])
    return SimpleNamespace(batch_size=4, req_pool_indices=torch.tensor([1, 2, 3, 0]), seq_lens=lengths, **more)


def test_sglangs_backend_is_told_of_batches_and_serves_the_layers(backend: SparseDecodeBackend) -> None:
    with pytest.raises(RuntimeError, match="no attention backend is attached"):
        backend.init_forward_metadata_out_graph(batch())
    windows = WindowBackend()
    backend.attach_windows(windows)
    assert backend.needs_cpu_seq_lens
    assert not SparseDecodeBackend.needs_cpu_seq_lens
    backend.init_cuda_graph_state(4, 4)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    forward_batch = batch(num_padding=1)
    backend.init_forward_metadata_out_graph(forward_batch)
    backend.init_forward_metadata_in_graph(forward_batch)
    # The padded row has a token for SGLang's backend, and none here.
    assert backend.step.buffers.seq_lens.tolist() == [40, 70, 33, 0]
    assert backend.step.counters.read().requests == 3
    q = torch.zeros(4, 2 * 64)
    layer = SimpleNamespace(layer_id=3)
    assert torch.equal(backend.forward_decode(q, q, q, layer, forward_batch, sinks=7), q + 1)
    assert windows.calls == [
        ("state", 4, 4),
        ("out", False),
        ("in",),
        ("decode", 3, {"save_kv_cache": True, "sinks": 7}),
    ]


def test_a_batch_without_a_graph_is_prepared_as_such(backend: SparseDecodeBackend) -> None:
    windows = WindowBackend()
    backend.attach_windows(windows)
    backend.init_forward_metadata(batch())
    assert windows.calls == [("eager",)]
    assert backend.step.buffers.seq_lens.tolist() == [40, 70, 33, 1]
    assert backend.step.counters.read().requests == 4


def test_rows_of_a_capture_are_all_padding(backend: SparseDecodeBackend) -> None:
    backend.attach_windows(WindowBackend())
    backend.init_forward_metadata_out_graph(batch(), in_capture=True)
    backend.init_forward_metadata_in_graph(batch())
    assert backend.step.buffers.seq_lens.tolist() == [0] * 4
    assert backend.step.counters.read().steps == 0


def test_each_batch_size_has_one_graph(backend: SparseDecodeBackend) -> None:
    """FlashInfer's metadata would be that of the graph captured last."""
    assert not backend.has_dense_steps
    backend.windows = frozenset()
    assert backend.has_dense_steps


def test_counts_are_of_the_other_layers(backend: SparseDecodeBackend) -> None:
    step = backend.step
    assert step.sparse_layers == [1]
    assert [layer in step.summaries for layer in range(LAYERS)] == [False, True, False, False]
    backend.attach_windows(WindowBackend())
    backend.init_forward_metadata_out_graph(batch(num_padding=1))
    backend.init_forward_metadata_in_graph(batch(num_padding=1))
    pools = torch.randn(2, PAGES * 32, 1, 64, generator=torch.Generator().manual_seed(1))
    q = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(2))
    step.summaries.update(1, *pools, torch.arange(PAGES))
    for layer in range(LAYERS):
        if layer in WINDOWS:
            step.skip(layer, 4)
        else:
            step.attend(layer, q, *pools, scale=0.125, out=torch.empty_like(q))
    # 3, 5 and 3 blocks; layer 2 reads all of them.
    kept = step.buffers.block_counts[1, :3, 0].tolist()
    assert sum(kept) < 11
    assert step.buffers.request_totals.tolist() == [
        [kept[0] + 3, 6],
        [kept[1] + 5, 10],
        [kept[2] + 3, 6],
        [0, 0],
    ]
    reading = step.counters.read()
    assert reading.kept_by_layer_and_head == [[], [sum(kept) / 11], [1.0], []]
    assert reading.kept_fraction == pytest.approx((sum(kept) + 11) / 22)
    # Of four layers, those without a window are of the first and the middle third.
    groups = by_layer_group(reading)
    assert set(groups) == {"first", "middle"}
    assert groups["first"].kept_fraction == pytest.approx(sum(kept) / 11)
    assert groups["middle"].bytes_read_fraction == 1


def test_memory_is_reserved_for_the_other_layers() -> None:
    def share(**windows: Any) -> float:
        made = reserve(None, OPTIONS, geometry=GEOMETRY, layers=LAYERS, max_pages=4, max_requests=4, **windows)
        assert isinstance(made, SparsePoolConfigurator)
        return made._summary_share

    # Layers 0, 1 and 3 have summaries without windows, layer 1 alone with them.
    assert share(windows=WINDOWS) == pytest.approx(share() / 3)
