"""Which row of open pages a request writes to: static buffers of a decode step over a KV pool of our own."""

from __future__ import annotations

import torch
from sparse_kernels import open_places

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
        self.closing_pages = torch.full((max_requests,), -1, dtype=torch.int32, device=device)
        """Pages of the pool that the step's new tokens fill; -1 for none."""
        self.closing_rows = torch.full((max_requests,), -1, dtype=torch.int32, device=device)
        """The rows of open pages that hold them."""

    def load(
        self,
        places: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
        page_table: torch.Tensor | None = None,
    ) -> None:
        """Notes where the new token of each request goes. Runs outside the graph, before the step, in one launch.

        Args:
            places: `[<=B]`, the new tokens' places in the pool, at least those of the rows before padding.
            seq_lens: `[B]` int32, the new token included; 0 for padded rows.
            rows: `[B]`, each request's row of the open pages.
            page_table: `[B, max_pages]`, gets each request's row in place of its open page: that is how estimators find
                the keys of open pages. A page that is full keeps its number, under which it has a summary.
        """
        open_places(
            places,
            rows,
            seq_lens,
            page_size=self._page_size,
            pool_slots=self.pool_slots,
            open_slots=self.slots,
            open_rows=self.rows,
            closing_pages=self.closing_pages,
            closing_rows=self.closing_rows,
            page_table=page_table,
        )
