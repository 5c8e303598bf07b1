"""Coverage rule. Bytes: the log masses once, and the lists."""

from __future__ import annotations

from collections.abc import Iterator

from sparse_kernels import coverage_rule, coverage_rule_reference

from .common import Measurement, Suite
from .rules import measure_rule


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures both groups and two coverages, every batch size and context."""
    for gamma, group in ((0.95, "average"), (0.99, "average"), (0.95, "every")):
        case = f"gamma {gamma}, {group}"
        yield from measure_rule(
            suite, "coverage_rule", case, coverage_rule, coverage_rule_reference, {"gamma": gamma}, group
        )
