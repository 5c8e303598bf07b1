"""What ends a benchmark early."""

from __future__ import annotations


class BenchmarkError(Exception):
    """Bad input, or a GPU or package that is not there. One line: what is wrong and what to do. Exit code 2."""


class ServerError(RuntimeError):
    """A server did not start, or did not answer as it should. Exit code 1."""
