"""Random ragged paged pools for kernel tests. Whatever an operation must not read is poisoned.

Poison: NaN in page 0, in unused pages and in the open pages' tokens beyond the sequence; ids far outside the pool in
unused page-table entries; NaN in the queries of empty rows.
"""

from dataclasses import dataclass

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16, torch.float32]
"""KV dtypes to test. The interpreter's bf16 arithmetic is wrong, hence fp16 and fp32 there."""

HUGE_PAGE = 2**30
"""A page id whose address faults, or fails in torch, when it is used."""


@dataclass
class PagedCase:
    """A batch in a paged pool; names and shapes as in docs/architecture.md."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    lengths: list[int]
    page_size: int
    block_size: int
    scale: float

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k_pool.shape[1]

    @property
    def group_size(self) -> int:
        return self.q.shape[1] // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.k_pool.shape[2]

    @property
    def num_pages(self) -> int:
        return self.k_pool.shape[0] // self.page_size

    @property
    def capacity(self) -> int:
        """`N`: the capacity of a row in blocks."""
        return self.page_table.shape[1] * (self.page_size // self.block_size)

    def blocks(self, b: int) -> int:
        return -(-self.lengths[b] // self.block_size)

    def slots(self, b: int) -> torch.Tensor:
        """Token slots of request `b`, in order: `[length]` int64."""
        tokens = torch.arange(self.lengths[b], device=self.q.device)
        pages = self.page_table[b, : -(-self.lengths[b] // self.page_size)].long()
        return pages[tokens // self.page_size] * self.page_size + tokens % self.page_size

    def keys(self, b: int) -> torch.Tensor:
        """Keys of request `b`: `[length, Hkv, D]`, pool dtype."""
        return self.k_pool[self.slots(b)]

    def values(self, b: int) -> torch.Tensor:
        """Values of request `b`: `[length, Hkv, D]`, pool dtype."""
        return self.v_pool[self.slots(b)]

    def closed_pages(self) -> torch.Tensor:
        """Physical ids of all closed pages, each once: `[n]` int32."""
        closed = [self.page_table[b, : n // self.page_size] for b, n in enumerate(self.lengths)]
        return torch.cat(closed).unique().to(torch.int32)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> torch.Tensor:
    """A tensor of values that no operation would write: NaN, or a large negative or 0xA5 pattern for integers."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    return torch.full(shape, 0xA5 if dtype == torch.uint8 else -1515870811, dtype=dtype, device=device)


def make_paged_case(
    lengths: list[int],
    *,
    num_kv_heads: int = 2,
    group_size: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    seed: int = 0,
    shared_pages: int = 0,
    key_bias: float = 0.0,
    extra_pages: int = 2,
    extra_rows: int = 1,
) -> PagedCase:
    """Builds a batch of requests with shuffled physical pages.

    Args:
        lengths: tokens of each request; 0 makes a padded row.
        shared_pages: leading pages that all requests long enough to close them have in common (a cached prefix).
        key_bias: size of a constant bias per KV head and channel added to the keys.
        extra_pages: unused pages in the pool, and unused page-table columns.
        extra_rows: rows of `page_table` and `seq_lens` beyond the batch, filled with poison.
    """
    rng = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    pages_of = [-(-n // page_size) for n in lengths]
    total = sum(pages_of) + extra_pages + 1
    order = (torch.randperm(total - 1, generator=rng) + 1).tolist()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    k = normal(total * page_size, num_kv_heads, head_dim)
    k += key_bias * normal(1, num_kv_heads, head_dim)
    v = normal(total * page_size, num_kv_heads, head_dim)
    q = normal(batch, num_kv_heads * group_size, head_dim) * 1.5
    page_table = torch.full((batch + extra_rows, max([*pages_of, 1]) + extra_pages), HUGE_PAGE, dtype=torch.int32)
    used = torch.zeros(total * page_size, dtype=torch.bool)
    shared: list[int] = []
    for b, length in enumerate(lengths):
        pages = []
        for i in range(pages_of[b]):
            if i < min(shared_pages, length // page_size):
                if i == len(shared):
                    shared.append(order.pop())
                pages.append(shared[i])
            else:
                pages.append(order.pop())
        page_table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for t in range(length):
            used[pages[t // page_size] * page_size + t % page_size] = True
        if length == 0:
            q[b] = float("nan")
    k[~used] = float("nan")
    v[~used] = float("nan")
    seq_lens = torch.tensor([*lengths, *[2**30] * extra_rows], dtype=torch.int32)
    return PagedCase(
        q=q.to(dtype).to(device),
        k_pool=k.to(dtype).to(device),
        v_pool=v.to(dtype).to(device),
        page_table=page_table.to(device),
        seq_lens=seq_lens.to(device),
        lengths=list(lengths),
        page_size=page_size,
        block_size=block_size,
        scale=head_dim**-0.5,
    )


def random_block_lists(case: PagedCase, density: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ascending block lists, at least one block a non-empty row; unused entries are poisoned.

    Returns:
        `block_lists [B, Hkv, N]` int32 and `block_counts [B, Hkv]` int32.
    """
    rng = torch.Generator().manual_seed(seed)
    device = case.q.device
    lists = torch.full((case.batch, case.num_kv_heads, case.capacity), HUGE_PAGE, dtype=torch.int32)
    counts = torch.zeros(case.batch, case.num_kv_heads, dtype=torch.int32)
    for b in range(case.batch):
        n = case.blocks(b)
        for h in range(case.num_kv_heads):
            if n == 0:
                continue
            keep = torch.rand(n, generator=rng) < density
            keep[int(torch.randint(n, (1,), generator=rng))] = True
            chosen = keep.nonzero().flatten().to(torch.int32)
            lists[b, h, : len(chosen)] = chosen
            counts[b, h] = len(chosen)
    return lists.to(device), counts.to(device)


def mixed_blocks(number, block, dim, seed=0):
    """Of magnitudes from 2**-20 to 2**20 by token, and of 2**-12 to 1 of that by channel."""
    rng = torch.Generator().manual_seed(seed)
    made = torch.randn(number, 2, block, dim, generator=rng)
    made *= torch.randint(-20, 21, (number, 2, block, 1), generator=rng).exp2()
    made *= torch.randint(-12, 1, made.shape, generator=rng).exp2()
    made[0, 0, 0] = 0
    made[0, 0, 1, :3] = torch.tensor([448.0, -448.0, 449.0])
    made[0, 0, 2] = 448
    made[0, 1, 0] = 1e-40
    made[0, 1, 1] = 3e38
    return made
