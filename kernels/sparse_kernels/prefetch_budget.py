"""How many blocks each layer's forecast may fetch in a step: by what the last steps missed, and by the time there is.

Misses come in bursts, and what is fetched for nothing takes time on the link that a later miss waits for. So a layer's
budget follows what it lacked: all of it at once when that grows, a quarter less in each step when it shrinks. A layer
that lacks next to nothing gets no budget, and its rows count as padded then, so that nothing is scored for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_contiguous, check_dtype, check_rows, check_shape
from ._dispatch import use_triton
from .slot_maps import TOTALS

STATE = ("misses", "used", "lacked", "starts", "nanoseconds", "window")
"""Columns of `state`: totals as they were at the last step; blocks that a step lacks; a stopwatch as it was at the last
step; nanoseconds beside which a layer's copies run, 0 if not known."""

_MISSES = TOTALS.index("misses")


@triton.jit(do_not_specialize=["least", "most", "bytes_per_microsecond", "block_bytes", "min_context"])
def _prefetch_budget_kernel(
    seq_lens,
    demand,
    forecasts,
    clock,
    state,
    budgets,
    lengths,
    batch,
    lengths_stride,
    least,
    most,
    bytes_per_microsecond,
    block_bytes,
    min_context,
    DEMAND: tl.constexpr,
    MISSES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    layer = tl.program_id(0).to(tl.int64)
    own = state + layer * COLUMNS
    misses = tl.load(demand + layer * DEMAND + MISSES)
    used = tl.load(forecasts + layer * 2 + 1)
    need = misses - tl.load(own) + used - tl.load(own + 1)
    lacked = tl.maximum(need, tl.load(own + 2) * 3 // 4)
    window = tl.load(own + 5)
    if CLOCK:
        starts = tl.load(clock + 1)
        nanoseconds = tl.load(clock + 2)
        times = starts - tl.load(own + 3)
        if times > 0:
            mean = (nanoseconds - tl.load(own + 4)) // times
            window = tl.where(window > 0, (3 * window + mean) // 4, mean)
    limit = most.to(tl.int64)
    limit = tl.where(window > 0, tl.minimum(limit, window * bytes_per_microsecond // 1000 // block_bytes), limit)
    budget = tl.minimum((lacked * 3 + 1) // 2, limit)
    budget = tl.where(lacked >= least, budget, 0)
    longest = 0
    for start in range(0, batch, CHUNK):
        index = start + tl.arange(0, CHUNK)
        longest = tl.maximum(longest, tl.max(tl.load(seq_lens + index, mask=index < batch, other=0), 0))
    # A step of padded rows alone, as in warm-up, teaches nothing.
    real = longest > 0
    budget = tl.where(real, budget, 0)
    if real:
        tl.store(own, misses)
        tl.store(own + 1, used)
        tl.store(own + 2, lacked)
        tl.store(own + 5, window)
        if CLOCK:
            tl.store(own + 3, starts)
            tl.store(own + 4, nanoseconds)
    tl.store(budgets + layer, budget.to(tl.int32))
    for start in range(0, batch, CHUNK):
        index = start + tl.arange(0, CHUNK)
        length = tl.load(seq_lens + index, mask=index < batch, other=0)
        before = tl.where(length % PAGE == 0, length - PAGE, length - 1)
        # It selects, but what can be scored of it would count as short, of which everything is read.
        between = (length >= min_context) & (before < min_context)
        before = tl.where((budget > 0) & (length > 0) & (between == 0), before, 0)
        tl.store(lengths + layer * lengths_stride + index, before, mask=index < batch)


def prefetch_state(layers: int, most: int, device: torch.device | str) -> torch.Tensor:
    """`[layers, 6]` int64, see `STATE`, of layers that may lack up to `most` blocks until a step has shown."""
    state = torch.zeros((layers, len(STATE)), dtype=torch.int64, device=device)
    state[:, STATE.index("lacked")] = most
    return state


def prefetch_budget(
    seq_lens: torch.Tensor,
    demand_totals: torch.Tensor,
    forecast_totals: torch.Tensor,
    *,
    clock: torch.Tensor | None,
    state: torch.Tensor,
    least: int,
    most: int,
    bytes_per_microsecond: int,
    block_bytes: int,
    page_size: int,
    min_context: int,
    budgets: torch.Tensor,
    lengths: torch.Tensor,
    impl: str = "auto",
) -> None:
    """Writes each layer's budget for the step that begins.

    What a step lacked of a layer is what it missed and what it would have missed but for a forecast; `lacked` is the
    larger of that and of three quarters of its last value. The budget is one and a half times as much, as far as copies
    fit beside a layer; 0 if `lacked` is below `least`, and in steps of padded rows alone.

    Args:
        seq_lens: `[>=B]` int32; 0 for padded rows.
        demand_totals: `[layers, 4]` int64, see `slot_maps.TOTALS`.
        forecast_totals: `[layers, 2]` int64, see `prefetch_totals.FIELDS`.
        clock: a stopwatch of one phase, the time of one layer in a step that copies may take; None for no such bound.
        state: of `prefetch_state`.
        least: blocks for which scoring is not worth its time.
        most: blocks, whatever is lacked.
        bytes_per_microsecond: that copies bring.
        block_bytes: of one copy.
        page_size: tokens.
        min_context: requests with fewer tokens read everything.
        budgets: `[layers]` int32, output.
        lengths: `[layers, B]` int32, output: for layers with a budget the tokens of each request that can be scored,
            else 0: those before the step's own, without the page that it fills, if it does: that is no open page any
            more, and not in its place yet. 0 too if that leaves fewer than `min_context` of a request that has them.
        impl: `auto`, `triton` or `torch`.

    Raises:
        ValueError: a shape, dtype or size is not as above.
    """
    layers, batch = lengths.shape
    check_rows("seq_lens", seq_lens, batch, ndim=1)
    check_dtype("seq_lens", seq_lens, torch.int32)
    for name, tensor, shape, dtype in (
        ("demand_totals", demand_totals, (layers, len(TOTALS)), torch.int64),
        ("forecast_totals", forecast_totals, (layers, 2), torch.int64),
        ("state", state, (layers, len(STATE)), torch.int64),
        ("budgets", budgets, (layers,), torch.int32),
        *(() if clock is None else (("clock", clock, (3,), torch.int64),)),
    ):
        check_shape(name, tensor, *shape)
        check_dtype(name, tensor, dtype)
        check_contiguous(name, tensor)
    check_dtype("lengths", lengths, torch.int32)
    positive = {"most": most, "bytes_per_microsecond": bytes_per_microsecond, "block_bytes": block_bytes}
    for name, value in (positive | {"page_size": page_size}).items():
        if value < 1:
            raise ValueError(f"{name} is {value}; needed: at least 1")
    sizes = {"least": least, **positive}
    if not use_triton(impl, lengths):
        return prefetch_budget_reference(
            seq_lens,
            demand_totals,
            forecast_totals,
            clock=clock,
            state=state,
            **sizes,
            page_size=page_size,
            min_context=min_context,
            budgets=budgets,
            lengths=lengths,
        )
    _prefetch_budget_kernel[(layers,)](
        seq_lens,
        demand_totals,
        forecast_totals,
        state if clock is None else clock,
        state,
        budgets,
        lengths,
        batch,
        lengths.stride(0),
        **sizes,
        min_context=min_context,
        DEMAND=len(TOTALS),
        MISSES=_MISSES,
        COLUMNS=len(STATE),
        CLOCK=clock is not None,
        PAGE=page_size,
        CHUNK=256,
        num_warps=1,
    )


def prefetch_budget_reference(
    seq_lens: torch.Tensor,
    demand_totals: torch.Tensor,
    forecast_totals: torch.Tensor,
    *,
    clock: torch.Tensor | None,
    state: torch.Tensor,
    least: int,
    most: int,
    bytes_per_microsecond: int,
    block_bytes: int,
    page_size: int,
    min_context: int,
    budgets: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """`prefetch_budget` in plain torch."""
    misses, used = demand_totals[:, _MISSES], forecast_totals[:, 1]
    lacked = torch.maximum(misses - state[:, 0] + used - state[:, 1], state[:, 2] * 3 // 4)
    window, timed = state[:, 5], state[:, 3:5]
    if clock is not None:
        times = clock[1] - state[:, 3]
        mean = (clock[2] - state[:, 4]) // times.clamp(min=1)
        window = torch.where(times > 0, torch.where(window > 0, (3 * window + mean) // 4, mean), window)
        timed = clock[1:].expand(len(state), 2)
    limit = torch.where(window > 0, (window * bytes_per_microsecond // 1000 // block_bytes).clamp(max=most), most)
    real = seq_lens[: lengths.shape[1]].amax() > 0
    budget = torch.where((lacked >= least) & real, torch.minimum((lacked * 3 + 1) // 2, limit), 0)
    learned = torch.cat([torch.stack([misses, used, lacked], 1), timed, window[:, None]], 1)
    state.copy_(torch.where(real, learned, state))
    budgets.copy_(budget)
    own = seq_lens[: lengths.shape[1]]
    before = torch.where(own % page_size == 0, own - page_size, own - 1).clamp(min=0)
    before = torch.where((own >= min_context) & (before < min_context), 0, before)
    lengths.copy_(torch.where(budget[:, None] > 0, before, 0))
