"""Self-planning sparse attention with its combine, at several shares of kept blocks; FA3 over all tokens as a peer.

Bytes: keys and values of the listed blocks, and the lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from sparse_kernels import AttentionWorkspace, sparse_attention, sparse_attention_reference

from .common import Batch, Measurement, Suite, check_close, time_in_turn

KEPT = (0.1, 0.3, 1.0)

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


def check_output(suite: Suite, batch: Batch, lists: Lists, out: torch.Tensor, what: str) -> None:
    """Compares the first and the last request: the reference takes too much memory for all at once."""
    for b in {0, batch.size - 1}:
        block_lists, block_counts = lists
        one = (None, None) if block_lists is None else (block_lists[b : b + 1], block_counts[b : b + 1])
        check_close(f"{what}, request {b}", out[b], expected_output(suite, batch.request(b), one)[0], 1e-2)


def make_lists(suite: Suite, sets: list[Batch], kept: float) -> list[Lists]:
    """Lists for each input set; none if all blocks are kept."""
    if kept >= 1:
        return [(None, None)] * len(sets)
    return [suite.random_lists(batch, kept, seed) for seed, batch in enumerate(sets)]


def bytes_to_move(suite: Suite, batch: Batch, lists: Lists) -> int:
    """Keys and values of the listed blocks, and the lists themselves."""
    if lists[1] is None:
        return 2 * batch.tokens * suite.num_kv_heads * suite.head_bytes
    return int(lists[1].sum()) * (2 * suite.block_size * suite.head_bytes + 4)


@cache
def load_fa3() -> Callable[..., torch.Tensor] | None:
    """SGLang's FlashAttention 3, or None where it cannot be loaded."""
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except Exception as error:  # of several kinds, where no Hopper GPU or no fitting CUDA library is found
        print(f"no FA3 peer: {error}".splitlines()[0])
        return None
    return flash_attn_with_kvcache


def fa3_call(suite: Suite, batch: Batch) -> Callable[[], torch.Tensor]:
    """Dense attention as SGLang's `fa3` backend calls it for decode."""
    pages = (-1, suite.page_size, suite.num_kv_heads, suite.head_dim)
    return partial(
        load_fa3(),
        q=batch.q,
        k_cache=suite.k_pool.view(pages),
        v_cache=suite.v_pool.view(pages),
        page_table=batch.page_table,
        cache_seqlens=batch.seq_lens,
        cu_seqlens_q=torch.arange(batch.size + 1, dtype=torch.int32, device=suite.device),
        max_seqlen_q=1,
        softmax_scale=suite.scale,
        causal=True,
    )


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures every batch size, context and share of kept blocks."""
    workspace = AttentionWorkspace.create(None, suite.group_size, suite.head_dim, suite.device)
    for size, context in suite.cases():
        for kept in KEPT:
            dense_bytes = 2 * size * context * suite.num_kv_heads * suite.head_bytes
            sets = suite.input_sets(size, context, int(dense_bytes * kept))
            lists = make_lists(suite, sets, kept)
            outs = [torch.empty_like(batch.q) for batch in sets]
            calls = [attention_call(suite, *each, workspace, out) for *each, out in zip(sets, lists, outs, strict=True)]
            calls[0]()
            check_output(suite, sets[0], lists[0], outs[0], f"sparse_attention B={size} context={context} kept={kept}")
            moved = sum(bytes_to_move(suite, *each) for each in zip(sets, lists, strict=True)) // len(sets)
            share = moved / bytes_to_move(suite, sets[0], (None, None))
            case = "all blocks" if kept >= 1 else "lists"
            yield Measurement("sparse_attention", case, size, context, share, time_in_turn(calls), moved)
            if kept >= 1 and load_fa3() is not None:
                peers = [fa3_call(suite, batch) for batch in sets]
                check_output(suite, sets[0], lists[0], peers[0]().view_as(outs[0]), "FA3")
                yield Measurement("FA3 (peer)", case, size, context, share, time_in_turn(peers), moved)
