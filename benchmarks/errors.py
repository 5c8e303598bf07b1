"""What ends a benchmark with exit code 2."""

from __future__ import annotations


class BenchmarkError(Exception):
    """Bad input, or a GPU or package that is not there. One line: what is wrong and what to do."""
