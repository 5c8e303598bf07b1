"""Which row of open pages a request writes to: static buffers of a decode step over a KV pool of our own."""

from __future__ import annotations

import torch

EXTRA_ROWS = 2
"""SGLang's padding row, and one that its request table may have beyond the requests."""


class OpenPages:
    """Places of a step's new tokens. Buffers never move, so that a CUDA graph can hold them.

    Args:
        max_requests: largest batch.
    """

    def __init__(self, page_size: int, max_requests: int, device: torch.device | str) -> None:
        self._page_size = page_size
        self.pool_slots = torch.full((max_requests,), -1, dtype=torch.int64, device=device)
        """Of each request's new token in the pool; -1 for padded rows."""
        self.slots = torch.full((max_requests,), -1, dtype=torch.int32, device=device)
        """The same in the open pages."""
        self.rows = torch.zeros(max_requests, dtype=torch.int32, device=device)

    def load(self, places: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor) -> None:
        """Notes where the new token of each request goes. Runs outside the graph, before the step.

        Args:
            places: `[B]`, the new token's place in the pool; not used for padded rows.
            seq_lens: `[B]` int32, the new token included; 0 for padded rows.
            rows: `[B]`, each request's row of the open pages.
        """
        batch, page = len(seq_lens), self._page_size
        last = (seq_lens - 1).clamp_min(0)
        used = seq_lens > 0
        self.rows[:batch] = rows
        self.pool_slots[:batch] = torch.where(used, places, -1)
        self.slots[:batch] = torch.where(used, self.rows[:batch] * page + last % page, -1)
        self.pool_slots[batch:] = -1
        self.slots[batch:] = -1


def padded_places(places: torch.Tensor, batch: int) -> torch.Tensor:
    """`places [<=batch]` as int64, with zeros for the padded rows behind."""
    return torch.nn.functional.pad(places[:batch].long(), (0, max(0, batch - len(places))))


def point_at_rows(page_table: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor, page_size: int) -> None:
    """Puts each request's row in place of its open page, `page_table [B, max_pages]`: that is how estimators find the
    keys of open pages. A page that is full keeps its number, under which it has a summary."""
    opened = seq_lens % page_size != 0
    last = (seq_lens // page_size).long()[:, None].clamp_max(page_table.shape[1] - 1)
    page_table.scatter_(1, last, torch.where(opened[:, None], rows[:, None].int(), page_table.gather(1, last)))
