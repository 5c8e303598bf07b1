"""Top-k rule. Bytes: the log masses once, and the lists."""

from __future__ import annotations

from collections.abc import Iterator

from sparse_kernels import top_k_rule, top_k_rule_reference

from .common import Measurement, Suite
from .rules import measure_rule


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures a count and a share, both groups, every batch size and context."""
    for top_k, group in ((128, "average"), (0.25, "average"), (0.25, "every")):
        yield from measure_rule(
            suite, "top_k_rule", f"{top_k}, {group}", top_k_rule, top_k_rule_reference, {"top_k": top_k}, group
        )
