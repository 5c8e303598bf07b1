"""What one measurement varies: the server's options, the page size, and what only the harness can do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sglang_sparse.geometry import Geometry
from sglang_sparse.options import DEFAULT_PAGE_SIZE, OptionsError, SparseDecodeOptions
from sglang_sparse.selection import Estimator, make_estimator
from sglang_sparse.tail import CELL_TOKENS


@dataclass(frozen=True)
class Setting:
    """One way to decode sparsely. Requests of any length are selected from: `min_context` is ignored."""

    options: SparseDecodeOptions
    page_size: int = DEFAULT_PAGE_SIZE
    candidate: str | None = None
    """An estimator of `candidates` instead of the server's; `options.estimator` is then ignored."""
    tail: int | None = None
    """Blocks that are not read are answered by the mean value of so many tokens around them, weighted by their
    estimated mass; 0 drops them. None does what a server with these options does; candidates then drop them."""
    value_norm: bool = False
    """Blocks weigh their mass times the mean norm of their values, in what the rule has to cover."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", dataclasses.replace(self.options, min_context=0))
        self.options.check_page_size(self.page_size)
        if (self.tail or 0) % self.options.block_size:
            raise OptionsError(f"tail is {self.tail}: give a multiple of the block size {self.options.block_size}")

    @property
    def _served_tail(self) -> int:
        return min(self.page_size, CELL_TOKENS)

    @property
    def tail_tokens(self) -> int:
        """Tokens that share a mean value, which stands for those of them that are not read; 0 if nothing does."""
        if self.tail is not None:
            return self.tail
        follows = self.candidate is None and self.options.resolved_tail == "mean"
        return self._served_tail if follows else 0

    @property
    def uses_served_tail(self) -> bool:
        """Whether the tail is one that a server with this estimator computes."""
        return self.candidate is None and self.tail_tokens == self._served_tail

    @property
    def estimator(self) -> str:
        """The estimator's name with everything that changes it."""
        if self.candidate:
            name = self.candidate
        elif self.options.estimator == "thumbnail":
            name = f"thumbnail-{self.options.thumbnail_bits}bit"
        else:
            name = self.options.estimator
        parts = [name, f"page{self.page_size}", f"block{self.options.block_size}"]
        parts += (
            ["every"] * (self.options.group == "every")
            + [f"tail{self.tail_tokens}"] * bool(self.tail_tokens)
            + ["value-norm"] * self.value_norm
        )
        return "/".join(parts)

    @property
    def rule(self) -> str:
        o = self.options
        varied = "-by-head" if o.gamma_by_head else "-by-layer" if o.gamma_by_layer else ""
        return f"{o.rule}{varied}" + (f"-dense{len(o.dense_layers)}" if o.dense_layers else "")

    @property
    def value(self) -> float:
        """What the rule asks for; the mean where it differs by layer or head."""
        o = self.options
        if o.rule == "top-k":
            assert o.top_k is not None
            return o.top_k
        if o.rule == "top-delta":
            return o.resolved_delta
        layers = len(o.gamma_by_head or o.gamma_by_layer)
        return sum(map(o.gamma_of, range(layers))) / layers if layers else o.gamma

    def geometry(self, like: Geometry) -> Geometry:
        return dataclasses.replace(like, page_size=self.page_size, block_size=self.options.block_size)

    def make_estimator(self, geometry: Geometry) -> Estimator:
        if self.candidate:
            from sglang_sparse.calibrate.candidates import make_candidate

            return make_candidate(self.candidate, geometry)
        return make_estimator(self.options, geometry)


DENSE = Setting(SparseDecodeOptions(rule="all"))
"""Everything is read, through the same code: the yardstick."""
