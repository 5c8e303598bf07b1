"""FlashInfer's variable block-sparse attention: a mask a KV head, one query a row.

It takes contiguous keys and values, which are copied out of the pages beforehand. Rows of a batch are passed as more
KV heads. Its host plan makes an index for every token that is read and waits for the device, so a step that chooses
anew cannot be captured with it; it is timed apart and together with the kernel.
"""

from __future__ import annotations

from functools import cache

import torch

from . import AttentionInputs, PeerCall, import_problem
from .dense_copy import contiguous_kv

WORKSPACE_BYTES = 512 << 20


@cache
def why_missing() -> str:
    return import_problem("flashinfer", "einops")


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def mask_and_sizes(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Which columns each row reads, `[B * Hkv, 1, C]` bool, and the columns' tokens, `[B * Hkv, C]` int32.

    Columns are the blocks, a request's last one as short as it is, and one more for what is left of the longest
    request's blocks, which nothing reads.
    """
    assert inputs.lists is not None
    block_lists, counts = inputs.lists
    batch, heads, capacity = block_lists.shape
    size = inputs.block_size
    blocks = -(-int(inputs.seq_lens.max()) // size)
    listed = torch.arange(capacity, device=counts.device) < counts[..., None]
    mask = torch.zeros(batch, heads, blocks + 1, dtype=torch.bool, device=counts.device)
    # Entries past the count are undefined: they go to the last column, which is cleared.
    mask.scatter_(2, torch.where(listed, block_lists, blocks).long(), True)
    mask[..., blocks] = False
    starts = torch.arange(blocks, device=counts.device) * size
    tokens = (inputs.seq_lens[:batch, None] - starts).clamp(0, size)
    rest = blocks * size - tokens.sum(1, keepdim=True)
    sizes = torch.cat((tokens, rest), 1).int()[:, None].expand(-1, heads, -1)
    return mask.view(batch * heads, 1, -1), sizes.reshape(batch * heads, -1)


def prepare(inputs: AttentionInputs) -> list[PeerCall]:
    import flashinfer

    mask, sizes = mask_and_sizes(inputs)
    rows, dim = len(mask), inputs.q.shape[-1]
    keys, values = (
        copied.flatten(0, 1) for copied in contiguous_kv(inputs, tokens=(mask.shape[-1] - 1) * inputs.block_size)
    )
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(_workspace(inputs.q.device))
    q = inputs.q.reshape(rows * inputs.group_size, 1, dim)
    one_query = torch.ones(rows, 1, dtype=torch.int32, device=q.device)

    def plan() -> None:
        wrapper.plan(
            mask,
            one_query,
            sizes,
            rows * inputs.group_size,
            rows,
            dim,
            sm_scale=inputs.scale,
            q_data_type=q.dtype,
            kv_data_type=keys.dtype,
        )

    def run() -> torch.Tensor:
        return wrapper.run(q, keys, values).reshape(inputs.q.shape)

    def both() -> torch.Tensor:
        plan()
        return run()

    plan()
    return [
        PeerCall("kernel, contiguous copy", run, "eager"),
        PeerCall("plan", plan, "host", gives_output=False),
        PeerCall("plan and kernel", both, "host"),
    ]
