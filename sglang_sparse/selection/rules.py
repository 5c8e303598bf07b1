"""Rules: how estimated log-masses become each row's list of blocks.

Sink tokens, the latest tokens and the open page are in every list. Rows below the minimum context list everything.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from sparse_kernels import TapPoint, coverage_rule, top_delta_rule, top_k_rule

from sglang_sparse.geometry import Geometry
from sglang_sparse.options import SparseDecodeOptions
from sglang_sparse.selection.maxima import Maxima


class Rule(Protocol):
    """Chooses blocks from `log_mass`; takes one threshold a row, so that requests and KV heads may differ."""

    name: str
    needs_mass: bool
    """False if the rule keeps everything, so that neither estimate nor list is needed."""
    needs_maxima: bool
    """Whether it compares scores: `select` then takes `maxima`."""

    def select(
        self,
        log_mass: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        thresholds: torch.Tensor,
        block_lists: torch.Tensor,
        block_counts: torch.Tensor,
        scratch: torch.Tensor,
        kept_total: torch.Tensor,
        kept_mask: torch.Tensor | None = None,
        tap: TapPoint | None = None,
        maxima: Maxima | None = None,
    ) -> None:
        """Writes `block_lists`, `block_counts` and `kept_mask`, and adds the counts to `kept_total`
        (docs/architecture.md).

        `thresholds` is fp32, `[>=B]` or `[>=B, Hkv]`: what the rule asks for in each row (gamma, k or delta). `tap` is
        where the audit gets a copy of one request's lists.
        """

    def thresholds(self, layer: int) -> list[float]:
        """What the options ask for in each KV head of a layer."""


class _ThresholdRule:
    """What the rules that search a threshold share: geometry, forced blocks, group treatment."""

    needs_mass = True
    needs_maxima = False

    def __init__(self, options: SparseDecodeOptions, geometry: Geometry) -> None:
        self._kv_heads = geometry.kv_heads
        self._arguments: dict[str, Any] = {
            "group": options.group,
            "page_size": geometry.page_size,
            "block_size": geometry.block_size,
            "sink_tokens": options.sink_tokens,
            "window_tokens": options.window_tokens,
            "min_context": options.min_context,
        }


class CoverageRule(_ThresholdRule):
    """The fewest blocks whose estimated mass reaches gamma (MOIRA)."""

    name = "coverage"

    def __init__(self, options: SparseDecodeOptions, geometry: Geometry) -> None:
        super().__init__(options, geometry)
        self._options = options
        self._first_kv_head = geometry.first_kv_head

    def thresholds(self, layer: int) -> list[float]:
        return list(self._options.head_gammas(layer, self._kv_heads, self._first_kv_head))

    def select(
        self,
        log_mass: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        thresholds: torch.Tensor,
        maxima: Maxima | None = None,
        **buffers: Any,
    ) -> None:
        coverage_rule(log_mass, seq_lens, gamma=thresholds, **self._arguments, **buffers)


class TopKRule(_ThresholdRule):
    """The k blocks of largest estimated mass, or that fraction of a row's blocks (Quest)."""

    name = "top-k"

    def __init__(self, options: SparseDecodeOptions, geometry: Geometry) -> None:
        super().__init__(options, geometry)
        assert options.top_k is not None
        self._top_k = float(options.top_k)

    def thresholds(self, layer: int) -> list[float]:
        return [self._top_k] * self._kv_heads

    def select(
        self,
        log_mass: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        thresholds: torch.Tensor,
        maxima: Maxima | None = None,
        **buffers: Any,
    ) -> None:
        top_k_rule(log_mass, seq_lens, top_k=thresholds, **self._arguments, **buffers)


class TopDeltaRule:
    """The blocks with a token whose score, for any head, is within delta nats of the head's pseudo-maximum (FFD)."""

    name = "top-delta"
    needs_mass = True
    needs_maxima = True

    def __init__(self, options: SparseDecodeOptions, geometry: Geometry) -> None:
        self._kv_heads = geometry.kv_heads
        self._delta = float(options.resolved_delta)
        self._arguments: dict[str, Any] = {
            "page_size": geometry.page_size,
            "block_size": geometry.block_size,
            "sink_tokens": options.sink_tokens,
            "window_tokens": options.window_tokens,
            "min_context": options.min_context,
        }

    def thresholds(self, layer: int) -> list[float]:
        return [self._delta] * self._kv_heads

    def select(
        self,
        log_mass: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        thresholds: torch.Tensor,
        scratch: torch.Tensor,
        maxima: Maxima | None = None,
        **buffers: Any,
    ) -> None:
        assert maxima is not None
        top_delta_rule(maxima.blocks, maxima.pseudo, seq_lens, delta=thresholds, **self._arguments, **buffers)


class AllRule:
    """Every block: dense attention through the sparse path."""

    name = "all"
    needs_mass = False
    needs_maxima = False

    def __init__(self, geometry: Geometry) -> None:
        self._kv_heads = geometry.kv_heads

    def thresholds(self, layer: int) -> list[float]:
        return [1.0] * self._kv_heads

    def select(self, log_mass: torch.Tensor, seq_lens: torch.Tensor, **buffers: Any) -> None:
        raise AssertionError("rule all makes no lists")


def make_rule(options: SparseDecodeOptions, geometry: Geometry) -> Rule:
    """The rule that `options` name. Coverage of gamma = 1 in all layers and heads is rule `all`."""
    if options.rule == "all" or (options.rule == "coverage" and options.lowest_gamma == 1):
        return AllRule(geometry)
    rules: dict[str, type[CoverageRule | TopKRule | TopDeltaRule]] = {
        "coverage": CoverageRule,
        "top-k": TopKRule,
        "top-delta": TopDeltaRule,
    }
    return rules[options.rule](options, geometry)
