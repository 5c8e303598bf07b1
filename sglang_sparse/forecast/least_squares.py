"""The linear map nearest to the next layer's queries, from sums over tokens: where training of heads starts.

Between a layer's input and the next one's lie the layer's attention and MLP, of which a linear map of the input finds a
good part. Ridge regression of what is missing to a prior map: as little as there is to learn from, the prior is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
"""Of the squared change to the prior, as multiples of each channel's own square: tried in turn."""


@dataclass
class Sums:
    """Sums over tokens of one layer, in float64.

    Attributes:
        inputs: `[hidden + 1, hidden + 1]`, products of the inputs, the last one a constant 1.
        products: `[hidden + 1, rows]`, of inputs and what the prior lacks.
        squares: what the prior lacks, squared.
    """

    inputs: torch.Tensor
    products: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, missing: torch.Tensor) -> Sums:
        """Of tokens `x` `[T, hidden]` and of `missing` `[T, rows]`."""
        x = torch.cat((x, torch.ones_like(x[:, :1])), 1).double()
        missing = missing.double()
        return cls(x.T @ x, x.T @ missing, missing.square().sum())

    def add(self, other: Sums) -> None:
        self.inputs += other.inputs
        self.products += other.products
        self.squares += other.squares

    def error(self, change: torch.Tensor) -> float:
        """What is still missing, squared, with a `change` `[hidden + 1, rows]` to the prior."""
        left = self.squares - 2 * (change * self.products).sum() + (change * (self.inputs @ change)).sum()
        return left.item()


def best_change(sums: Sums, held_out: Sums) -> torch.Tensor:
    """The change `[hidden + 1, rows]` to the prior that leaves least of the held-out tokens, of one for each of
    `PENALTIES` and none; float64. The last row is that of the bias."""
    best = torch.zeros_like(sums.products)
    least = held_out.error(best)
    diagonal = sums.inputs.diagonal()
    # A channel that is never there has no square to be penalised by.
    diagonal = torch.where(diagonal > 0, diagonal, 1.0)
    for penalty in PENALTIES:
        change = torch.linalg.solve(sums.inputs + torch.diag(penalty * diagonal), sums.products)
        error = held_out.error(change)
        if error < least:
            best, least = change, error
    return best
