"""What the default rule keeps in the first layer of the workload's model, without writing or prefilling it.

The first layer sees the embeddings alone, and deeper ones see little else: so it tells what the model keeps.
"""

from __future__ import annotations

import torch

from benchmarks.workload.model import Shape, project
from benchmarks.workload.prompts import run_prompt
from sglang_sparse.decode_step import DecodeStep
from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions


def rotate(states: torch.Tensor, positions: torch.Tensor, shape: Shape) -> torch.Tensor:
    """RoPE of `states` `[T, heads, D]` at `positions` `[T]`, as the model's config describes it."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**shape.config("float32")))(states[None].cpu(), positions[None].cpu())
    on_device = (part.to(states.device) for part in (cos, sin))
    rotated, _ = apply_rotary_pos_emb(states[None], states[None], *on_device, unsqueeze_dim=2)
    return rotated[0]


def first_layer_kept(
    shape: Shape,
    *,
    sharpness: float,
    context: int,
    queries: int = 8,
    seed: int = 0,
    options: SparseDecodeOptions | None = None,
    page_size: int = 64,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, float]:
    """Shares of blocks kept, `[queries, Hkv]`, and KV bytes read ÷ all KV bytes, by a query of each of `queries` random
    tokens after one prompt of runs.

    The projections are drawn as the model's are, but are not those of any written model: seeds do not match.
    """
    options = options or SparseDecodeOptions(min_context=0)
    rng = torch.Generator(device).manual_seed(seed)
    prompt = torch.tensor(run_prompt(context, shape.vocabulary, seed=seed), device=device)
    asked = torch.randint(shape.vocabulary // 2, shape.vocabulary, (queries,), generator=rng, device=device)
    tokens, places = torch.cat((prompt, asked)).unique(return_inverse=True)
    embedded = torch.randn(len(tokens), shape.hidden, generator=rng, device=device)
    embedded /= embedded.pow(2).mean(-1, keepdim=True).sqrt()
    query_weight, key_weight = project(shape, sharpness, rng)
    geometry = Geometry(shape.kv_heads, shape.group, shape.head_dim, torch.bfloat16, page_size, options.block_size)
    every_key = (embedded @ key_weight.T).unflatten(-1, (shape.kv_heads, shape.head_dim))
    pages = -(-context // page_size)
    k_pool = torch.zeros((pages + 1) * page_size, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    for piece in torch.arange(context, device=device).split(8192):
        k_pool[page_size + piece] = rotate(every_key[places[piece]], piece, shape).to(k_pool.dtype)
    asked_states = embedded[places[context:]] @ query_weight.T
    q = asked_states.unflatten(-1, (shape.kv_heads * shape.group, shape.head_dim))
    q = rotate(q, torch.full((queries,), context - 1, device=device), shape).to(k_pool.dtype)
    step = DecodeStep(options, geometry, layers=1, pages=pages + 1, max_requests=1, max_pages=pages, device=device)
    step.summaries.update(0, k_pool, k_pool, torch.arange(1, pages + 1, dtype=torch.int32, device=device))
    slots = torch.arange(page_size, (pages + 1) * page_size, dtype=torch.int32, device=device)[None]
    step.buffers.load(slots, torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([context], device=device))
    blocks = -(-context // options.block_size)
    shares = torch.empty(queries, shape.kv_heads)
    for number in range(queries):
        step.counters.count_step(step.buffers.seq_lens)
        one = q[number : number + 1].contiguous()
        step.attend(0, one, k_pool, k_pool, scale=shape.head_dim**-0.5, out=torch.empty_like(one))
        shares[number] = step.buffers.block_counts[0, 0].cpu() / blocks
    read = step.counters.read().bytes_read_fraction
    assert read is not None
    return shares, read
