import math

import torch

from sglang_sparse.selection.coverage import chosen_blocks, head_coverage


def test_head_coverage_counts_listed_blocks_alone() -> None:
    poison = float("nan")
    # One request of three blocks, one KV head of two query heads; the fourth entry is beyond the request.
    log_mass = torch.tensor([[[[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]]]).log()
    log_mass = torch.cat([log_mass + 3, torch.full((1, 1, 2, 1), poison)], -1)
    lists = torch.tensor([[[0, 2, 1, 99]]], dtype=torch.int32)
    counts = torch.tensor([[2]], dtype=torch.int32)
    covered = head_coverage(log_mass, torch.tensor([41], dtype=torch.int32), lists, counts, 16)
    torch.testing.assert_close(covered, torch.tensor([[[0.8, 0.75]]]))


def test_head_coverage_of_everything_is_one_and_padded_rows_count_as_covered() -> None:
    log_mass = torch.randn(2, 3, 2, 5)
    log_mass[1] = math.nan
    lists = torch.arange(5, dtype=torch.int32).expand(2, 3, 5).clone()
    counts = torch.tensor([[5, 5, 5], [0, 0, 0]], dtype=torch.int32)
    covered = head_coverage(log_mass, torch.tensor([80, 0], dtype=torch.int32), lists, counts, 16)
    torch.testing.assert_close(covered, torch.ones(2, 3, 2))


def test_chosen_blocks_ignores_what_lies_past_the_count() -> None:
    lists = torch.tensor([[[1, 3, -7, 1 << 30]]], dtype=torch.int32)
    assert chosen_blocks(lists, torch.tensor([[2]], dtype=torch.int32)).tolist() == [[[False, True, False, True]]]
