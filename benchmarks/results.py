"""`results.csv`: what was measured, one row a case. Rows are only ever appended.

Columns: `date` (UTC), `gpu`, `versions`, `commit`, `command`, `run` (the same for rows that one process measured
together), `bench`, `case`, `batch`, `context` (tokens), `impl`, `ms`, `kept` (blocks read ÷ all blocks), `bytes_read`
(bytes that one call, or one decode step, has to read and write), `read_share` (those bytes ÷ time ÷ the read rate
measured in the same run), `kl` (nats, to the first server of the run). A cell is empty where a column says nothing
about the row.
"""

from __future__ import annotations

import csv
import datetime
import io
import math
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_sparse.files import FileError, check_target, write_bytes

from . import machine

COLUMNS = (
    "date",
    "gpu",
    "versions",
    "commit",
    "command",
    "run",
    "bench",
    "case",
    "batch",
    "context",
    "impl",
    "ms",
    "kept",
    "bytes_read",
    "read_share",
    "kl",
)
DEFAULT_PATH = Path(__file__).with_name("results.csv")


@dataclass(frozen=True)
class Row:
    """One measurement, without what the run adds."""

    bench: str
    case: str
    batch: int
    context: int
    impl: str
    ms: float
    kept: float | None = None
    bytes_read: int | None = None
    read_share: float | None = None
    kl: float | None = None


class Results:
    """Appends the rows of one run to a file; refuses a file that does not hold results before anything is measured.

    Args:
        path: created, with its header, by the first row; None keeps nothing.
        command: the command line, as it can be typed again.
        flag: that named the file, for messages.

    Raises:
        FileError: the file cannot be written, or is of another kind.
    """

    def __init__(self, path: Path | None, command: str, flag: str = "--results") -> None:
        self.path = path
        self._flag = flag
        self.run = f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        self._command = command
        self._common: dict[str, str] | None = None
        if path is not None:
            check_target(flag, path, (".csv",))
            self._content()

    def _content(self) -> str:
        """What the file holds, with its header and a last line that is whole."""
        assert self.path is not None
        header = ",".join(COLUMNS) + "\n"
        if not self.path.exists():
            return header
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FileError(f"{self._flag} {self.path}: cannot be read ({reason})") from None
        if not text:
            return header
        first = text.splitlines()[0]
        if first != header.strip():
            raise FileError(f"{self._flag} {self.path}: its first line is not {header.strip()!r}: name another file")
        return text if text.endswith("\n") else text + "\n"

    def append(self, rows: Sequence[Row]) -> None:
        """Appends all of `rows` or none.

        Raises:
            FileError: as for the class.
            ValueError: a time is not above 0, or a number is not finite: such a row measured nothing.
        """
        for row in rows:
            numbers = [value for value in asdict(row).values() if isinstance(value, float)]
            if not row.ms > 0 or not all(map(math.isfinite, numbers)):
                raise ValueError(f"not a measurement: {row}")
        if self.path is None or not rows:
            return
        if self._common is None:
            self._common = {
                "gpu": machine.gpu_name(),
                "versions": machine.versions(),
                "commit": machine.commit(),
                "command": self._command,
                "run": self.run,
            }
        date = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M}"
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        for row in rows:
            cells = {name: _cell(value) for name, value in asdict(row).items()}
            writer.writerow({"date": date, **self._common, **cells})
        # Read anew each time: another run may have appended meanwhile.
        write_bytes(self.path, (self._content() + text.getvalue()).encode())


def read_results(path: Path, flag: str) -> list[dict[str, str]]:
    """The rows of the results file that `flag` names. Raises FileError if it is not one."""
    if not path.is_file():
        raise FileError(f"{flag} {path}: there is no such file")
    return list(csv.DictReader(io.StringIO(Results(path, "", flag)._content())))


def _cell(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def share(value: float | None) -> str:
    """A share as text for tables: `18.0%`, or nothing."""
    return "" if value is None else f"{value:.1%}"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligned text; the first `left` columns are flushed left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
