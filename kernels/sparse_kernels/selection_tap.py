"""A tap on the selection rules: a copy of what one layer chose for one request, taken inside the rule's kernel.

Whether and where a step is tapped is a value on the device, so that a captured CUDA graph can be told anew before each
replay. Rows that are not tapped cost two scalar loads; no launch is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import KV_DTYPES, check_contiguous, check_dtype, check_inner_contiguous, check_shape


@dataclass(frozen=True)
class SelectionTap:
    """What a rule tells of one request in one layer. Entries past a list's count are undefined."""

    target: torch.Tensor
    """`[2]` int32: layer and request row to tap in the steps to come; a layer of -1 taps nothing."""
    q: torch.Tensor
    """`[Hq, D]` in KV dtype: the request's queries."""
    block_lists: torch.Tensor
    """`[Hkv, N]` int32."""
    block_counts: torch.Tensor
    """`[Hkv]` int32."""
    seq_len: torch.Tensor
    """`[1]` int32, the request's tokens."""

    @classmethod
    def create(
        cls,
        *,
        kv_heads: int,
        group_size: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> SelectionTap:
        """A disarmed tap; `capacity` is N, the capacity of a row in blocks."""

        def int32(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            target=int32(2).fill_(-1),
            q=torch.zeros(kv_heads * group_size, head_dim, dtype=dtype, device=device),
            block_lists=int32(kv_heads, capacity),
            block_counts=int32(kv_heads),
            seq_len=int32(1),
        )

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())

    def arm(self, layer: int, row: int) -> None:
        """Taps request `row` of the batch in `layer`, and zeroes `seq_len` and `block_counts`. Does not wait for the
        device."""
        self.seq_len.zero_()
        self.block_counts.zero_()
        self.target[0].fill_(layer)
        self.target[1].fill_(row)

    def disarm(self) -> None:
        """Taps nothing from here on; what was tapped stays. Does not wait for the device."""
        self.target.fill_(-1)


@dataclass(frozen=True)
class TapPoint:
    """One call of a rule, as the tap needs to know it."""

    tap: SelectionTap
    layer: int
    q: torch.Tensor
    """`[B, Hq, D]`, the queries behind the call's log masses."""
    first_row: int = 0
    """Row in the whole batch of the call's first request."""

    def check(self, shape: Sequence[int]) -> None:
        """Raises ValueError unless tap and queries fit log masses of `shape` (`[B, Hkv, G, N]`)."""
        batch, kv_heads, group_size, capacity = shape
        check_dtype("q", self.q, *KV_DTYPES)
        check_shape("q", self.q, batch, kv_heads * group_size, None)
        check_inner_contiguous("q", self.q)
        for name, shape, dtype in (
            ("target", (2,), torch.int32),
            ("q", tuple(self.q.shape[1:]), self.q.dtype),
            ("block_lists", (kv_heads, capacity), torch.int32),
            ("block_counts", (kv_heads,), torch.int32),
            ("seq_len", (1,), torch.int32),
        ):
            tensor = getattr(self.tap, name)
            check_shape(f"tap.{name}", tensor, *shape)
            check_dtype(f"tap.{name}", tensor, dtype)
            check_contiguous(f"tap.{name}", tensor)

    def record_reference(self, seq_lens: torch.Tensor, block_lists: torch.Tensor, block_counts: torch.Tensor) -> None:
        """What the kernel does, in torch: copies the tapped row of a finished selection. Waits for the device."""
        layer, row = self.tap.target.tolist()
        b = row - self.first_row
        if layer != self.layer or not 0 <= b < self.q.shape[0]:
            return
        self.tap.q.copy_(self.q[b])
        self.tap.block_counts.copy_(block_counts[b])
        self.tap.seq_len.copy_(seq_lens[b : b + 1])
        for h, count in enumerate(block_counts[b].tolist()):
            self.tap.block_lists[h, :count] = block_lists[b, h, :count]


def tap_arguments(tap: TapPoint | None) -> tuple:
    """A rule kernel's arguments from `q` to `q_head_stride`."""
    if tap is None:
        return (*[None] * 6, -1, 0, 0, 0)
    t = tap.tap
    tensors = (tap.q, t.target, t.q, t.block_lists, t.block_counts, t.seq_len)
    return (*tensors, tap.layer, tap.first_row, tap.q.stride(0), tap.q.stride(1))


@triton.jit
def copy_row(
    lists,
    count,
    queries,
    head_stride,
    tap_lists,
    tap_queries,
    G: tl.constexpr,
    D: tl.constexpr,
    Q_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copies a row's list and queries to the tap; all pointers are the row's."""
    copy_list(lists, count, tap_lists, CHUNK)
    copy_queries(queries, head_stride, tap_queries, G, D, Q_CHUNK)


@triton.jit
def copy_list(lists, count, tap_lists, CHUNK: tl.constexpr):
    """Copies a row's list, which this program wrote, to the tap; both pointers are the row's."""
    # Another thread may have written the entry that this one reads.
    tl.debug_barrier()
    for start in range(0, count, CHUNK):
        places = start + tl.arange(0, CHUNK)
        tl.store(tap_lists + places, tl.load(lists + places, mask=places < count), mask=places < count)


@triton.jit
def copy_queries(queries, head_stride, tap_queries, G: tl.constexpr, D: tl.constexpr, Q_CHUNK: tl.constexpr):
    """Copies a row's queries to the tap; both pointers are the row's."""
    index = tl.arange(0, Q_CHUNK)
    values = tl.load(queries + index // D * head_stride + index % D, mask=index < G * D)
    tl.store(tap_queries + index, values, mask=index < G * D)
