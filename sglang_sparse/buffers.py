"""Static device buffers of a decode step. Their addresses are captured in CUDA graphs, so they never move."""

from __future__ import annotations

import torch
from sparse_kernels import AttentionWorkspace, snapshot_page_table
from sparse_kernels.request_totals import FIELDS

from sglang_sparse.geometry import Geometry
from sglang_sparse.memory import requests_per_turn
from sglang_sparse.selection import Maxima


class DecodeBuffers:
    """What one decode step writes and reads.

    Args:
        max_requests: largest batch.
        max_pages: pages of the longest request.
        thresholds: what the selection rule asks for in each layer and KV head.
        selects: False if no layer selects, so that masses and lists are never written.
        lists: whether layers that select may do so by way of block lists; False if they all take the fused pass.
        has_maxima: whether the rule compares scores.
        has_tail: whether the blocks that are not read are answered, which takes their mask.
        fused_requests: the largest batch that takes the fused pass.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        max_requests: int,
        max_pages: int,
        thresholds: list[list[float]],
        selects: bool,
        has_tail: bool,
        lists: bool = True,
        has_maxima: bool = False,
        fused_requests: int = 0,
        device: torch.device | str,
    ) -> None:
        self._page_size = geometry.page_size
        self.max_requests = max_requests
        self.page_table = torch.zeros((max_requests, max_pages), dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.closing_pages = torch.full((max_requests,), -1, dtype=torch.int32, device=device)
        by_head = torch.tensor(thresholds, dtype=torch.float32, device=device)
        self.thresholds = by_head[:, None].expand(-1, max_requests, -1).contiguous()
        """`[layers, max_requests, Hkv]`."""

        self.turn = max_requests
        if lists:
            self.turn = requests_per_turn(geometry, max_pages, max_requests, has_tail, has_maxima)
        rows = (self.turn if selects and lists else 0, geometry.kv_heads)
        blocks = max_pages * geometry.blocks_per_page
        self.log_mass = torch.empty((*rows, geometry.group_size, blocks), dtype=torch.float32, device=device)
        self.scratch = torch.empty((*rows, blocks), dtype=torch.float32, device=device)
        self.block_lists = torch.empty((*rows, blocks), dtype=torch.int32, device=device)
        counted = (len(thresholds) if selects else 0, max_requests, geometry.kv_heads)
        self.block_counts = torch.zeros(counted, dtype=torch.int32, device=device)
        """`[layers, max_requests, Hkv]` int32, lengths of the lists in the last step; written in layers that select."""
        counted = (counted[0] if fused_requests else 0, fused_requests, geometry.kv_heads)
        self.last_kept = torch.zeros(counted, dtype=torch.int32, device=device)
        """`[layers, fused_requests, Hkv]` int32, blocks that the rows of the last fused step kept, whoever they were;
        the next one shares its work out by them."""
        self.request_totals = torch.zeros((max_requests, len(FIELDS)), dtype=torch.int64, device=device)
        """Blocks that each request of the last step read, and blocks that it had, over layers and KV heads."""
        answered = rows[0] if has_tail else 0
        self.kept_mask = torch.empty((answered, geometry.kv_heads, blocks), dtype=torch.uint8, device=device)
        self.maxima = Maxima.create(rows[0], geometry, blocks, device) if has_maxima else None
        self.attention = AttentionWorkspace.create(
            num_programs=None, group_size=geometry.group_size, head_dim=geometry.head_dim, device=device
        )

    @property
    def bytes(self) -> int:
        tensors = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        if self.maxima:
            tensors += [self.maxima.blocks, self.maxima.pseudo]
        return sum(tensor.nbytes for tensor in tensors)

    def empty_rows(self, first: int, end: int) -> None:
        """Makes the loaded rows from `first` up to `end` padded rows."""
        self.seq_lens[first:end] = 0
        self.closing_pages[first:end] = -1

    def load(self, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Copies the step's rows of SGLang's request table, which may change while the captured step runs.

        `req_pool_indices` and `seq_lens` are `[B]`; a length of 0 marks a padded row.
        """
        batch = len(seq_lens)
        snapshot_page_table(
            req_to_token,
            req_pool_indices,
            seq_lens,
            page_size=self._page_size,
            page_table=self.page_table[:batch],
            seq_lens_out=self.seq_lens[:batch],
            closing_pages=self.closing_pages[:batch],
        )
