"""Coverage rule. Bytes: the log masses once, and the lists."""

from __future__ import annotations

from collections.abc import Iterator

from sparse_kernels import coverage_rule, coverage_rule_reference

from .common import Measurement, Suite
from .rules import measure_rule


def run(suite: Suite) -> Iterator[Measurement]:
    """Measures both groups, two coverages, the mask, and a tap on no or the first request, every batch and context."""
    for gamma, group, tapped_row, with_mask, note in (
        (0.95, "average", None, False, ""),
        (0.95, "average", None, True, ", mask"),
        (0.95, "average", -1, False, ", idle tap"),
        (0.95, "average", 0, False, ", tap"),
        (0.99, "average", None, False, ""),
        (0.95, "every", None, False, ""),
    ):
        case = f"gamma {gamma}, {group}{note}"
        yield from measure_rule(
            suite,
            "coverage_rule",
            case,
            coverage_rule,
            coverage_rule_reference,
            {"gamma": gamma},
            group,
            tapped_row,
            with_mask,
        )
