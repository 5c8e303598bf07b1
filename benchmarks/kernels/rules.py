"""What the benchmarks of the selection rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from sparse_kernels import SelectionTap, TapPoint
from sparse_kernels._cluster_launch import without_clusters
from sparse_kernels._select_cluster import chosen_size

from .common import Batch, Measurement, Suite, time_in_turn

SINK_TOKENS = 16
WINDOW_TOKENS = 64

SPREAD, HEAD_SPREAD = 2.2, 0.5
"""Standard deviations of the random log masses, of a row and of its heads around it: gamma .95 keeps a third or so."""

CHOSEN, SINGLE = "sparse_kernels", "sparse_kernels, single blocks"
"""Implementations: as the rule chooses, and with one thread block a row."""


def measure_rule(
    suite: Suite,
    name: str,
    case: str,
    operation: Callable[..., None],
    reference: Callable[..., None],
    target: dict[str, float],
    group: str,
    tapped_row: int | None = None,
    with_mask: bool = False,
    impl: str = CHOSEN,
) -> Iterator[Measurement]:
    """Measures a rule for every batch size and context. `target` is gamma or top_k with its value.

    Where the rule splits rows over clusters of thread blocks, it is measured without them too, as `SINGLE`. With an
    `impl` of another name `operation` is some way to run the rule, not the rule that chooses one.

    With `tapped_row` the rule has a tap on that request, or on none if it is negative; with `with_mask` it writes one.
    """
    ((target_name, value),) = target.items()
    for size, context in suite.cases():
        capacity = suite.capacity(context)
        row_bytes = suite.group_size * suite.blocks(context) * 4
        sets = suite.input_sets(size, context, size * suite.num_kv_heads * row_bytes)
        rng = torch.Generator(suite.device).manual_seed(size)
        shape = (size, suite.num_kv_heads, suite.group_size, capacity)
        masses = [
            SPREAD * torch.randn(size, suite.num_kv_heads, 1, capacity, generator=rng, device=suite.device)
            + HEAD_SPREAD * torch.randn(shape, generator=rng, device=suite.device)
            for _ in sets
        ]
        lists = [torch.zeros(*shape[:2], capacity, dtype=torch.int32, device=suite.device) for _ in sets]
        counts = [torch.zeros(shape[:2], dtype=torch.int32, device=suite.device) for _ in sets]
        scratch = torch.zeros(*shape[:2], capacity, device=suite.device)
        mask = torch.zeros(*shape[:2], capacity, dtype=torch.uint8, device=suite.device) if with_mask else None
        targets = torch.full((size,), float(value), device=suite.device)
        tap = None if tapped_row is None else _make_tap(suite, capacity, tapped_row)

        def arguments(
            i: int, batch: Batch, block_lists: torch.Tensor, block_counts: torch.Tensor, masses=masses, targets=targets
        ) -> dict:
            return {
                "log_mass": masses[i],
                "seq_lens": batch.seq_lens,
                target_name: targets,
                "group": group,
                "page_size": suite.page_size,
                "block_size": suite.block_size,
                "sink_tokens": SINK_TOKENS,
                "window_tokens": WINDOW_TOKENS,
                "min_context": 0,
                "block_lists": block_lists,
                "block_counts": block_counts,
            }

        calls = [
            partial(
                operation,
                **arguments(i, batch, lists[i], counts[i]),
                scratch=scratch,
                kept_mask=mask,
                tap=None if tap is None else TapPoint(tap, layer=0, q=batch.q),
            )
            for i, batch in enumerate(sets)
        ]
        moved = size * suite.num_kv_heads * row_bytes
        splits = impl == CHOSEN and group == "average" and chosen_size(masses[0]) > 1
        for way in (impl, SINGLE) if splits else (impl,):
            with without_clusters() if way == SINGLE else nullcontext():
                calls[0]()
                for b in {0, size - 1}:
                    one = slice(b, b + 1)
                    expected_lists, expected_counts = torch.zeros_like(lists[0][one]), torch.zeros_like(counts[0][one])
                    inputs = arguments(0, sets[0].request(b), expected_lists, expected_counts)
                    inputs.update(log_mass=masses[0][one])
                    inputs[target_name] = targets[one]
                    reference(**inputs, scratch=scratch[one].clone())
                    _check_lists(
                        f"{name} {case} B={size} context={context}",
                        lists[0][b],
                        counts[0][b],
                        expected_lists[0],
                        expected_counts[0],
                    )
                if tap is not None and tapped_row is not None and tapped_row >= 0:
                    _check_tap(
                        f"{name} {case} B={size} context={context}", tap, sets[0], lists[0], counts[0], tapped_row
                    )
                blocks = suite.num_kv_heads * int(((sets[0].seq_lens - 1) // suite.block_size + 1).sum())
                kept = int(counts[0].sum()) / blocks
                if mask is not None and int(mask.sum()) != int(counts[0].sum()):
                    # The last call of all sets that ran is the first.
                    raise RuntimeError(f"{name} {case} B={size} context={context}: the mask does not match the lists")
                seconds = time_in_turn(calls)
            bytes_moved = moved + int(counts[0].sum()) * 4
            yield Measurement(name, case, size, context, kept, seconds, bytes_moved, way)


def _make_tap(suite: Suite, capacity: int, row: int) -> SelectionTap:
    tap = SelectionTap.create(
        kv_heads=suite.num_kv_heads,
        group_size=suite.group_size,
        head_dim=suite.head_dim,
        capacity=capacity,
        dtype=suite.dtype,
        device=suite.device,
    )
    if row >= 0:
        tap.arm(0, row)
    return tap


def _check_tap(what: str, tap: SelectionTap, batch: Batch, lists: torch.Tensor, counts: torch.Tensor, row: int) -> None:
    """Raises RuntimeError unless the tap holds what the last call wrote for its row."""
    same = torch.equal(tap.block_counts, counts[row]) and torch.equal(tap.q, batch.q[row])
    for h, count in enumerate(counts[row].tolist()):
        same = same and torch.equal(tap.block_lists[h, :count], lists[row, h, :count])
    if not same or tap.seq_len.item() != batch.seq_lens[row].item():
        raise RuntimeError(f"{what}: the tap does not hold the row it names")


def _check_lists(
    what: str, lists: torch.Tensor, counts: torch.Tensor, expected_lists: torch.Tensor, expected_counts: torch.Tensor
) -> None:
    """Raises RuntimeError unless the lists agree but for a block in a thousand, which rounding may move."""
    for h, (count, expected) in enumerate(zip(counts.tolist(), expected_counts.tolist(), strict=True)):
        chosen, wanted = (set(row[h, :n].tolist()) for row, n in ((lists, count), (expected_lists, expected)))
        if len(chosen) != count or len(chosen ^ wanted) > 2 + expected // 1000:
            raise RuntimeError(
                f"{what}, head {h}: {len(chosen ^ wanted)} of {expected} blocks differ from the reference"
            )
