"""Self-planning sparse attention with its combine, at several shares of kept blocks, and its peers.

Dense peers run beside attention over all blocks, sparse ones on the same lists. Bytes: keys and values of the listed
blocks, and the lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from sparse_kernels import AttentionWorkspace, sparse_attention, sparse_attention_reference

from benchmarks import peers
from benchmarks.kept_fractions import draw_kept, is_number
from benchmarks.peers import AttentionInputs

from .common import Batch, Measurement, Suite, check_close, time_eagerly, time_in_turn, time_on_host

Lists = tuple[torch.Tensor | None, torch.Tensor | None]


def attention_call(
    suite: Suite, batch: Batch, lists: Lists, workspace: AttentionWorkspace, out: torch.Tensor
) -> Callable[[], None]:
    """The operation on one input set."""
    return partial(
        sparse_attention,
        batch.q,
        suite.k_pool,
        suite.v_pool,
        batch.page_table,
        batch.seq_lens,
        *lists,
        scale=suite.scale,
        page_size=suite.page_size,
        block_size=suite.block_size,
        out=out,
        workspace=workspace,
    )


def expected_output(suite: Suite, batch: Batch, lists: Lists) -> torch.Tensor:
    """The torch reference of one input set."""
    expected = torch.empty_like(batch.q)
    sparse_attention_reference(
        batch.q,
        suite.k_pool,
        suite.v_pool,
        batch.page_table,
        batch.seq_lens,
        *lists,
        scale=suite.scale,
        page_size=suite.page_size,
        block_size=suite.block_size,
        out=expected,
    )
    return expected


def check_output(
    suite: Suite, batch: Batch, lists: Lists, out: torch.Tensor, what: str, requests: tuple[int, ...] = (0, -1)
) -> None:
    """Compares some requests, the first and the last: the reference takes too much memory for all at once."""
    for b in {b % batch.size for b in requests}:
        block_lists, block_counts = lists
        one = (None, None) if block_lists is None else (block_lists[b : b + 1], block_counts[b : b + 1])
        check_close(f"{what}, request {b}", out[b], expected_output(suite, batch.request(b), one)[0], 1e-2)


def make_lists(suite: Suite, sets: list[Batch], kept: float | str) -> list[Lists]:
    """Lists for each input set; none if all blocks are kept."""
    if is_number(kept) and float(kept) >= 1:
        return [(None, None)] * len(sets)
    return [suite.random_lists(batch, kept, seed) for seed, batch in enumerate(sets)]


def bytes_to_move(suite: Suite, batch: Batch, lists: Lists) -> int:
    """Keys and values of the listed blocks, and the lists themselves."""
    if lists[1] is None:
        return 2 * batch.tokens * suite.num_kv_heads * suite.head_bytes
    return int(lists[1].sum()) * (2 * suite.block_size * suite.head_bytes + 4)


def peer_inputs(suite: Suite, batch: Batch, lists: Lists) -> AttentionInputs:
    """One input set as peers take it."""
    block_lists, block_counts = lists
    return AttentionInputs(
        batch.q,
        suite.k_pool,
        suite.v_pool,
        batch.page_table,
        batch.seq_lens,
        suite.scale,
        suite.page_size,
        suite.block_size,
        None if block_lists is None or block_counts is None else (block_lists, block_counts),
    )


TIMERS = {"graph": time_in_turn, "eager": time_eagerly, "host": time_on_host}


def measure_peer(
    suite: Suite, name: str, sets: list[Batch], lists: list[Lists], case: Measurement
) -> Iterator[Measurement]:
    """Times a peer on the input sets of `case`, our own measurement; prints a line if it cannot serve them."""
    try:
        peer = peers.module(name)
        prepared = [peer.prepare(peer_inputs(suite, *each)) for each in zip(sets, lists, strict=True)]
        for calls in zip(*prepared, strict=True):
            first = calls[0]
            if first.gives_output:
                result = first.call()
                assert result is not None
                # The first request is the longest, so that it is right in peers that know one length alone.
                check_output(suite, sets[0], lists[0], result.view_as(sets[0].q), f"{name}, {first.note}", (0,))
            seconds = TIMERS[first.how]([each.call for each in calls])
            moved = case.bytes if first.gives_output else None
            yield replace(case, case=f"{case.case}; {first.note}", seconds=seconds, bytes=moved, impl=name)
    except (peers.PeerError, torch.OutOfMemoryError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        print(f"peer {name}, B={case.batch} context={case.context} kept={case.kept:.0%}: {reason}: left out")
    finally:
        torch.cuda.empty_cache()


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size, context and share of kept blocks, and the suite's peers beside it."""
    workspace = AttentionWorkspace.create(None, suite.group_size, suite.head_dim, suite.device)
    for size, context in suite.cases():
        for kept in suite.kept:
            share = draw_kept(kept, size * suite.num_kv_heads).mean().item()
            dense = is_number(kept) and share >= 1
            dense_bytes = 2 * size * context * suite.num_kv_heads * suite.head_bytes
            sets = suite.input_sets(size, context, int(dense_bytes * share))
            lists = make_lists(suite, sets, kept)
            outs = [torch.empty_like(batch.q) for batch in sets]
            calls = [attention_call(suite, *each, workspace, out) for *each, out in zip(sets, lists, outs, strict=True)]
            calls[0]()
            check_output(suite, sets[0], lists[0], outs[0], f"sparse_attention B={size} context={context} kept={kept}")
            moved = sum(bytes_to_move(suite, *each) for each in zip(sets, lists, strict=True)) // len(sets)
            read = moved / bytes_to_move(suite, sets[0], (None, None))
            case = "all blocks" if dense else f"lists, kept {kept}"
            ours = Measurement("sparse_attention", case, size, context, read, time_in_turn(calls), moved)
            yield ours
            for name in suite.peers:
                if (name in peers.DENSE) == dense:
                    yield from measure_peer(suite, name, sets, lists, ours)
