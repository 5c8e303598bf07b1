"""FlashInfer's paged decode over ragged lists: one request with one KV head for each of our rows.

Its pages are our blocks, of one head, in place: the cache is viewed so that entry `slot * Hkv + head` starts at that
slot's key of that head and the next tokens follow at the pool's stride. Its host plan depends on the lists, so that a
step that chooses anew needs it in every layer; it is timed apart and together with the kernel.
"""

from __future__ import annotations

from functools import cache

import torch

from . import AttentionInputs, PeerCall, PeerError, import_problem

WORKSPACE_BYTES = 512 << 20


@cache
def why_missing() -> str:
    return import_problem("flashinfer")


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Partial results; calls run one after another and share it."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def head_pages(pool: torch.Tensor, block_size: int) -> torch.Tensor:
    """`pool` `[slots, Hkv, D]` as pages of one head: `[slots * Hkv - (block_size - 1) * Hkv, block_size, 1, D]`.

    Pages overlap; page `slot * Hkv + head` holds `block_size` tokens from `slot` on.
    """
    slots, heads, dim = pool.shape
    pages = slots * heads - (block_size - 1) * heads
    return pool.as_strided((pages, block_size, 1, dim), (dim, heads * dim, dim, 1))


def page_lists(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row starts `[B * Hkv + 1]`, pages of all rows, and tokens on each row's last page `[B * Hkv]`, all int32."""
    assert inputs.lists is not None
    block_lists, counts = inputs.lists
    batch, heads, capacity = block_lists.shape
    listed = torch.arange(capacity, device=counts.device) < counts[..., None]
    blocks_per_page = inputs.page_size // inputs.block_size
    blocks = block_lists.clamp(0, inputs.page_table.shape[1] * blocks_per_page - 1).long()
    pages = inputs.page_table[:batch, None].expand(-1, heads, -1).gather(2, blocks // blocks_per_page).long()
    slots = pages * inputs.page_size + blocks % blocks_per_page * inputs.block_size
    entries = slots * heads + torch.arange(heads, device=slots.device)[None, :, None]
    if int(entries.max()) >= 2**31:
        raise PeerError("the pool has more entries than its page indices can name")
    starts = torch.zeros(batch * heads + 1, dtype=torch.int32, device=counts.device)
    starts[1:] = counts.flatten().cumsum(0)
    last = block_lists.gather(2, (counts[..., None] - 1).clamp(min=0).long())[..., 0]
    tokens = (inputs.seq_lens[:batch, None] - last * inputs.block_size).clamp(1, inputs.block_size)
    return starts, entries[listed].int(), tokens.flatten().int()


def prepare(inputs: AttentionInputs) -> list[PeerCall]:
    import flashinfer

    starts, pages, last_tokens = page_lists(inputs)
    group, dim = inputs.group_size, inputs.q.shape[-1]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(inputs.q.device), kv_layout="NHD", use_tensor_cores=group >= 4
    )
    cache_views = tuple(head_pages(pool, inputs.block_size) for pool in (inputs.k_pool, inputs.v_pool))
    q = inputs.q.view(-1, group, dim)
    out = torch.empty_like(q)

    def plan() -> None:
        wrapper.plan(
            starts,
            pages,
            last_tokens,
            group,
            1,
            dim,
            inputs.block_size,
            q_data_type=q.dtype,
            kv_data_type=inputs.k_pool.dtype,
            sm_scale=inputs.scale,
        )

    def run() -> torch.Tensor:
        wrapper.run(q, cache_views, out=out)
        return out.view_as(inputs.q)

    def both() -> torch.Tensor:
        plan()
        return run()

    plan()
    return [
        PeerCall("kernel", run),
        PeerCall("plan", plan, "host", gives_output=False),
        PeerCall("plan and kernel", both, "host"),
    ]
