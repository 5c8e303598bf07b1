"""Brute-force float64 answers, independent of the package: loops over rows, heads and blocks, straight from the
definitions."""

import math

import torch
from factories import PagedCase, poisoned


def exact_mass(case: PagedCase, b: int) -> torch.Tensor:
    """Log mass of request `b`'s blocks from its keys: `[Hkv, G, blocks]` float64."""
    return token_mass(case, b, case.keys(b).double(), 0)


def token_mass(case: PagedCase, b: int, keys: torch.Tensor, first_token: int) -> torch.Tensor:
    """Log mass of the blocks of `keys [T, Hkv, D]`, which start at `first_token` of request `b`."""
    size = case.block_size
    assert first_token % size == 0
    blocks = -(-keys.shape[0] // size)
    mass = torch.empty(case.num_kv_heads, case.group_size, blocks, dtype=torch.float64, device=keys.device)
    for h in range(case.num_kv_heads):
        for g in range(case.group_size):
            scores = keys[:, h].double() @ case.q[b, h * case.group_size + g].double() * case.scale
            for j in range(blocks):
                mass[h, g, j] = scores[j * size : (j + 1) * size].logsumexp(0)
    return mass


def expected_mass(case: PagedCase, estimate, min_context: int) -> torch.Tensor:
    """What a block-mass operation leaves in a poisoned output: estimates for closed pages, exact masses for open ones,
    else NaN.

    Args:
        estimate: from a request's index to the log mass of its closed pages' blocks, `[Hkv, G, blocks]`.
    """
    out = poisoned(case.batch, case.num_kv_heads, case.group_size, case.capacity, device=case.q.device)
    for b, length in enumerate(case.lengths):
        if length == 0 or length < min_context:
            continue
        closed = length // case.page_size * (case.page_size // case.block_size)
        exact = exact_mass(case, b)
        out[b, :, :, : exact.shape[2]] = exact.float()
        if closed:
            out[b, :, :, :closed] = estimate(b).float()
    return out


def expected_maxima(case: PagedCase, keys_of, min_context: int) -> torch.Tensor:
    """Largest score of each block under `keys_of(b)`, `[length, Hkv, D]` float64; NaN where nothing is written."""
    out = poisoned(case.batch, case.num_kv_heads, case.group_size, case.capacity, device=case.q.device)
    for b, length in enumerate(case.lengths):
        if length == 0 or length < min_context:
            continue
        q = case.q[b].double().view(case.num_kv_heads, case.group_size, -1)
        scores = torch.einsum("hgd,thd->hgt", q, keys_of(b)) * case.scale
        for j in range(case.blocks(b)):
            out[b, :, :, j] = scores[..., j * case.block_size : (j + 1) * case.block_size].amax(-1).float()
    return out


def statistics_mass(case: PagedCase, b: int, statistics: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimated log mass of request `b`'s closed blocks from stored statistics: `[Hkv, G, blocks]` float64."""
    per_page = case.page_size // case.block_size
    closed = case.lengths[b] // case.page_size * per_page
    mass = torch.empty(case.num_kv_heads, case.group_size, closed, dtype=torch.float64, device=statistics.device)
    for h in range(case.num_kv_heads):
        for g in range(case.group_size):
            q = case.q[b, h * case.group_size + g].double()
            for j in range(closed):
                stats = statistics[int(case.page_table[b, j // per_page]), h, j % per_page].double()
                products = torch.maximum(q * stats[0], q * stats[1]) if kind == "minmax" else q * stats[0]
                score = products.sum()
                mass[h, g, j] = score * case.scale + math.log(case.block_size)
                if kind == "mean-variance":
                    mass[h, g, j] += 0.5 * case.scale**2 * (q**2 * stats[1]).sum()
    return mass


def code_at(codes: torch.Tensor, bits: int, head_dim: int, channel: int) -> torch.Tensor:
    """The code of one channel from packed bytes `[..., D * bits // 8]`, by the layout's definition."""

    def field(offset: int, width: int) -> torch.Tensor:
        plane_bytes = head_dim * width // 8
        byte = codes[..., offset + channel % plane_bytes].int()
        return (byte >> (channel // plane_bytes * width)) % 2**width

    if bits == 3:
        return field(0, 2) + 4 * field(head_dim // 4, 1)
    return field(0, bits)


def dequantised(codes: torch.Tensor, low_step: torch.Tensor, bits: int, head_dim: int) -> torch.Tensor:
    """Keys that thumbnails stand for, `[..., page_size, D]` float64, from `[..., page_size, bytes]` and `[..., 2,
    D]`."""
    levels = torch.stack([code_at(codes, bits, head_dim, c) for c in range(head_dim)], -1).double()
    low, step = low_step.double().unbind(-2)
    return low[..., None, :] + levels * step[..., None, :]


def head_shares(log_mass: torch.Tensor) -> torch.Tensor:
    """Share of each block in its head's mass, `[G, blocks]` float64, from `[G, blocks]`."""
    return log_mass.double().softmax(-1)
