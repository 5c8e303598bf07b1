import pytest
import torch
from factories import DEVICE, HUGE_PAGE
from mass_cases import over_impls
from sparse_kernels import ExpectedWorkspace, expected_blocks

STEP = 1 / 16
"""By how much shares that count as equal differ at most."""


class Rows:
    """A ragged batch: random masses, page tables and slots. What must not be read is poison."""

    def __init__(self, lengths, vectors=3, kv_heads=2, page_size=32, block_size=16, seed=0, resident=0.4):
        rng = torch.Generator().manual_seed(seed)
        self.lengths, self.page_size, self.block_size = lengths, page_size, block_size
        self.per_page = page_size // block_size
        columns = max(-(-n // page_size) for n in lengths) + 1
        self.capacity = columns * self.per_page
        used = [-(-n // page_size) for n in lengths]
        self.seen = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(used), generator=rng).int() + 1
        self.table = torch.full((len(lengths) + 1, columns), HUGE_PAGE, dtype=torch.int32)
        self.mass = torch.full((len(lengths), kv_heads, vectors, self.capacity), float("nan"))
        for b, pages in enumerate(used):
            self.table[b, :pages] = order[sum(used[:b]) : sum(used[: b + 1])]
            blocks = self.seen[b]
            self.mass[b, :, :, :blocks] = 3 * torch.randn(kv_heads, vectors, blocks, generator=rng)
        pool = (sum(used) + 1) * self.per_page
        absent = torch.rand(kv_heads, pool, generator=rng) >= resident
        self.slots = torch.where(absent, -1 - (torch.rand(kv_heads, pool, generator=rng) < 0.3).int(), 7).int()

    def blocks(self, b: int) -> int:
        """Blocks of full pages."""
        return self.lengths[b] // self.page_size * self.per_page

    def shares(self, min_context: int) -> torch.Tensor:
        """`[B, Hkv, N]` float64: of candidates; -1 for other blocks."""
        found = torch.full((*self.mass.shape[:2], self.capacity), -1.0, dtype=torch.float64)
        for b, length in enumerate(self.lengths):
            for h in range(self.mass.shape[1]):
                n = self.blocks(b)
                share = self.mass[b, h, :, : self.seen[b]].double().softmax(-1).nan_to_num(0).mean(0)
                if length < min_context:
                    share = torch.ones(n, dtype=torch.float64)
                for j in range(n):
                    block = int(self.table[b, j // self.per_page]) * self.per_page + j % self.per_page
                    if self.slots[h, block] < 0:
                        found[b, h, j] = share[j]
        return found

    def choose(self, budget, impl, min_context=40, workspace=None, part=(0, 1, 1)):
        """Chosen blocks `[B, Hkv, N]` bool; checks the lists."""
        batch, kv_heads = self.mass.shape[:2]
        workspace = workspace or ExpectedWorkspace.create(batch + 1, kv_heads, self.capacity, DEVICE)
        workspace.counts.fill_(99)
        lists = torch.full((batch + 1, kv_heads, self.capacity), -77, dtype=torch.int32, device=DEVICE)
        counts = torch.full((batch + 1, kv_heads), -77, dtype=torch.int32, device=DEVICE)
        lengths = torch.tensor([*self.lengths, 2**30], dtype=torch.int32, device=DEVICE)
        expected_blocks(
            self.mass.to(DEVICE),
            self.table.to(DEVICE),
            lengths,
            self.slots.to(DEVICE),
            budget=torch.tensor([budget], dtype=torch.int32, device=DEVICE),
            part=part,
            page_size=self.page_size,
            block_size=self.block_size,
            min_context=min_context,
            workspace=workspace,
            block_lists=lists,
            block_counts=counts,
            impl=impl,
        )
        chosen = torch.zeros(batch, kv_heads, self.capacity, dtype=torch.bool)
        for b in range(batch):
            for h in range(kv_heads):
                count = int(counts[b, h])
                listed = lists[b, h, :count].tolist()
                assert listed == sorted(set(listed))
                assert (lists[b, h, count:] == -77).all()
                chosen[b, h, listed] = True
        assert (lists[batch] == -77).all()
        assert (counts[batch] == -77).all()
        return chosen


LENGTHS = [1, 32, 0, 33, 65, 700, 39, 401]


@over_impls
@pytest.mark.parametrize(("vectors", "budget"), [(1, 9), (7, 1), (3, 31), (3, 10**6)])
def test_the_most_probable_absent_blocks_of_all_rows(impl, vectors, budget):
    rows = Rows(LENGTHS, vectors, seed=vectors)
    shares = rows.shares(40)
    chosen = rows.choose(budget, impl)
    assert (shares[chosen] > 0).all(), "a block that is no candidate"
    assert chosen.sum() == min(budget, int((shares > 0).sum()))
    left = shares[(shares > 0) & ~chosen]
    if len(left):
        assert shares[chosen].min() >= left.max() * (1 - STEP) - 1e-9


@over_impls
def test_equal_shares_are_taken_in_order(impl):
    rows = Rows([300, 200, 350], seed=4)
    rows.mass[:] = torch.tensor(float("nan"))
    chosen = rows.choose(20, impl, min_context=1000)
    candidates = (rows.shares(1000) > 0).flatten()
    assert candidates.sum() > 40
    first = candidates.nonzero()[:20].flatten()
    assert torch.equal(chosen.flatten().nonzero().flatten(), first)


@over_impls
def test_no_budget_lists_nothing(impl):
    assert not Rows(LENGTHS, seed=8).choose(0, impl).any()


@over_impls
def test_parts_of_the_requests_share_the_budget_and_use_all_of_it(impl):
    rows = Rows(LENGTHS, seed=8)
    assert torch.equal(rows.choose(35, impl, part=(2, 4, 7)), rows.choose(10, impl))
    for budget, parts in ((3, 4), (1, 3), (17, 5)):
        listed = [int(rows.choose(budget, impl, part=(i, i + 1, parts)).sum()) for i in range(parts)]
        assert sum(listed) == budget
        assert max(listed) - min(listed) <= 1


@over_impls
def test_what_the_open_page_takes_is_not_there_for_others(impl):
    """A row whose last tokens take nearly all of its attention has nothing that another would not need more."""
    rows = Rows([300, 320], seed=9, resident=0)
    rows.mass[0, :, :, rows.blocks(0)] += 40
    chosen = rows.choose(2 * rows.blocks(1), impl)
    assert not chosen[0].any()
    assert chosen[1].sum() == 2 * rows.blocks(1)


@over_impls
def test_rows_of_many_chunks(impl):
    rows = Rows([9000 * 16, 700], vectors=1, page_size=16, seed=5)
    shares = rows.shares(40)
    chosen = rows.choose(3000, impl)
    assert chosen.sum() == 3000
    assert shares[chosen].min() >= shares[~chosen].max() * (1 - STEP) - 1e-9
    assert chosen[0, :, 8192:].any()


@over_impls
def test_masses_that_are_no_numbers_expect_nothing(impl):
    rows = Rows([400, 400, 400, 400], vectors=2, seed=6, resident=0)
    rows.mass[0, 0, 0, 3] = float("nan")
    rows.mass[1, 0, :, 3] = float("inf")
    rows.mass[2, 0, :, : rows.blocks(2)] = float("-inf")
    rows.mass[3, 0, :, 3] = float("-inf")
    chosen = rows.choose(10**6, impl)
    blocks = rows.blocks(0)
    assert chosen[:, 0].sum(-1).tolist() == [blocks, 0, 0, blocks - 1]
    assert chosen[:, 1].sum(-1).tolist() == [blocks] * 4


@over_impls
def test_one_call_leaves_nothing_to_the_next(impl):
    workspace = ExpectedWorkspace.create(9, 2, Rows(LENGTHS).capacity, DEVICE)
    for seed, lengths in enumerate((LENGTHS, LENGTHS[::-1])):
        rows = Rows(LENGTHS, seed=seed)
        rows.lengths = [min(n, m) for n, m in zip(lengths, LENGTHS, strict=True)]
        assert torch.equal(rows.choose(15, impl, workspace=workspace), rows.choose(15, impl))


def test_workspace_bytes_are_what_is_allocated():
    made = ExpectedWorkspace.create(3, 2, 40, "meta")
    assert sum(tensor.nbytes for tensor in vars(made).values()) == ExpectedWorkspace.bytes(3, 2, 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": torch.ones(2, dtype=torch.int32)}, r"budget has shape .*; needed: \[1\]"),
        ({"part": (0, 3, 2)}, r"part is \(0, 3, 2\); needed"),
        ({"part": (2, 1, 2)}, r"part is \(2, 1, 2\); needed"),
        ({"part": (0, 0, 0)}, r"part is \(0, 0, 0\); needed"),
        ({"log_mass": torch.zeros(1, 2, 17, 8)}, "log_mass has 17 vectors for each KV head; needed: 1 to 16"),
        ({"slot_map": torch.zeros(1, 8, dtype=torch.int32)}, r"slot_map has shape .*; needed: \[2, \*\]"),
    ],
)
def test_refuses(change, message):
    arguments = {
        "log_mass": torch.zeros(1, 2, 3, 8),
        "page_table": torch.zeros(1, 4, dtype=torch.int32),
        "seq_lens": torch.zeros(1, dtype=torch.int32),
        "slot_map": torch.zeros(2, 8, dtype=torch.int32),
        "budget": torch.ones(1, dtype=torch.int32),
        "page_size": 32,
        "block_size": 16,
        "min_context": 0,
        "workspace": ExpectedWorkspace.create(1, 2, 8, "cpu"),
        "block_lists": torch.zeros(1, 2, 8, dtype=torch.int32),
        "block_counts": torch.zeros(1, 2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        expected_blocks(**(arguments | change))
