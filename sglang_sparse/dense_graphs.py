"""CUDA graphs for decode batches in which no request selects: estimate, rule and tail are left out of them.

A captured step cannot leave a launch out, and those that find nothing to do take half as long again as attention over a
short context. So each batch size is captured a second time as a dense step, and SGLang replays the one that goes with
the batch: it keeps graphs of one size apart by a label, which is otherwise that of LoRA adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_sparse import hook_targets

if TYPE_CHECKING:
    from sglang_sparse.backend import SparseDecodeBackend

LABEL = "sparse_decode_dense"


def dense_label(label: str | None) -> str:
    """The label of the dense graph beside SGLang's graph `label`."""
    return LABEL if label is None else f"{label}_{LABEL}"


def dense_graph_hooks(backend_of: Callable[[], SparseDecodeBackend | None]) -> dict[str, Callable]:
    """Hooks, by target, of the scheduler process; `backend_of` gives its backend once there is one."""

    def capture_graph(
        original: Callable,
        runner: Any,
        size: int,
        forward: Callable,
        stream_idx: int | None = None,
        variant_label: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        backend = backend_of()
        if backend is None:
            return original(runner, size, forward, stream_idx, variant_label, *args, **kwargs)
        # Graphs are captured anew while a server runs, too: after a step of either kind.
        with backend.step.of_kind(dense=False):
            result = original(runner, size, forward, stream_idx, variant_label, *args, **kwargs)
        if backend.has_dense_steps:
            with backend.step.of_kind(dense=True):
                original(runner, size, forward, stream_idx, dense_label(variant_label), *args, **kwargs)
        return result

    def graph_variant(original: Callable, runner: Any, forward_batch: Any) -> str | None:
        label = original(runner, forward_batch)
        backend = backend_of()
        # Also asked before the batch is loaded, to see that there is a graph: there are always both.
        return label if backend is None or not backend.step.dense else dense_label(label)

    return {hook_targets.CAPTURE_GRAPH: capture_graph, hook_targets.GRAPH_VARIANT: graph_variant}
