"""The live audit in SGLang's `/metrics`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_sparse import sglang_compat
from sglang_sparse.observe.audit import CoverageAudit
from sglang_sparse.observe.coverage_history import BUCKETS

logger = logging.getLogger(__name__)

NAME = "sglang:sparse_decode_coverage"
HELP = (
    "True share of the attention mass in the blocks that sparse decode chose, a value for each KV head: "
    "the mean of its query heads, or with group every their minimum."
)


class CoverageMetric:
    """A histogram of audited coverage by layer, one value a KV head and sample. Made when first exported to."""

    def __init__(self) -> None:
        self._observe: Callable[[int, float], None] | None = None
        self._is_made = False

    def export(self, audit: CoverageAudit, reporter: Any) -> None:
        """Adds the samples since the last call; `reporter` is SGLang's SchedulerMetricsReporter.

        An exception here would end the scheduler: it is logged, and nothing is exported from then on.
        """
        samples = audit.take_unread()
        try:
            if not self._is_made:
                self._is_made = True
                self._observe = sglang_compat.layer_histogram(reporter, NAME, HELP, BUCKETS)
            if self._observe is not None:
                for layer, coverage in samples:
                    for value in coverage:
                        self._observe(layer, value)
        except Exception:
            logger.exception("the metric %s failed and is off from here on", NAME)
            self._observe = None
