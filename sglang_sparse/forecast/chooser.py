"""Forecasts that choose what attention reads, as SparDA's do: a baseline, whose mistakes change the output.

Layer l's normed input, kept in a static buffer, gives the vectors that rank layer l + 1's blocks. A layer without a
forecast, the first one, is ranked by the mean of its own queries: the projection that it would have for itself.
"""

from __future__ import annotations

import torch

from sglang_sparse.geometry import Geometry

from .protocol import Forecast


class ForecastChooser:
    """What stands for queries where blocks are chosen.

    Args:
        forecast: with one vector for all query heads of a KV head, as SparDA has it, or several for as many heads each.
        max_requests: largest batch.
        hidden: width of the inputs.
        dtype: of the inputs.
    """

    def __init__(
        self,
        forecast: Forecast,
        geometry: Geometry,
        *,
        max_requests: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.forecast = forecast
        self._geometry = geometry
        # Of two layers: the input of one is written before that of the last has been read.
        self._inputs = torch.zeros((2, max_requests, hidden), dtype=dtype, device=device)
        self._batch = 0
        self._noted: list[int | None] = [None, None]

    def begin(self, batch: int) -> None:
        """A decode step of so many requests follows; 0: something else, whose inputs are not noted."""
        self._batch = batch
        self._noted = [None, None]

    def note(self, layer: int, x: torch.Tensor) -> None:
        """The normed input `[B, hidden]` of a layer's query projection, of which a decode step keeps a copy."""
        if not self._batch or len(x) != self._batch or layer + 1 not in self.forecast:
            return
        self._inputs[layer % 2, : self._batch].copy_(x)
        self._noted[layer % 2] = layer

    def vectors(self, layer: int, q: torch.Tensor, seq_lens: torch.Tensor, turn: slice) -> torch.Tensor:
        """`[b, Hq, D]`, the queries' dtype: what ranks the blocks of `layer` for a turn's requests.

        Args:
            q: `[b, Hq, D]`, the layer's own queries, whose means rank where there is no forecast.
            seq_lens: `[b]` int32, in tokens, that of this step included.
            turn: which requests of the batch these are.

        Raises:
            RuntimeError: the input of the layer before has not been noted in this step.
        """
        g, before = self._geometry, layer - 1
        if layer not in self.forecast:
            own = q.unflatten(1, (g.kv_heads, g.group_size)).float()
            return self._for_each_head(own.mean(2, keepdim=True)).to(q.dtype)
        if self._noted[before % 2] != before:
            raise RuntimeError(
                f"the input of layer {before} was not noted: nothing chooses the blocks of layer {layer}"
            )
        vectors = self.forecast.vectors(layer, self._inputs[before % 2, turn], (seq_lens - 1).long())
        return self._for_each_head(vectors).to(q.dtype)

    def _for_each_head(self, vectors: torch.Tensor) -> torch.Tensor:
        """`[b, Hkv, R, D]` to `[b, Hq, D]`: the audit wants a rule to see as many vectors as there are queries."""
        return vectors.repeat_interleave(self._geometry.group_size // vectors.shape[2], 2).flatten(1, 2)
