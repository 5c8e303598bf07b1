"""Shows that a long step is alive: what it does and for how many seconds."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType

INTERVAL_SECONDS = 10.0


class Progress:
    """A context manager around one long step.

    On a terminal one line is rewritten every second, elsewhere a line is added every ``INTERVAL_SECONDS``.
    ``note`` says what the step is at just now.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._note = ""
        self._over = threading.Event()
        self._on_terminal = sys.stdout.isatty()

    def note(self, text: str) -> None:
        self._note = " ".join(text.split())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        if not self._on_terminal:
            print(f"{self._what} ...", flush=True)
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        end = "" if kind is None else ", not finished"
        self._write(f"{self._what}: {self.seconds:.0f} s{end}", last=True)

    def _beat(self) -> None:
        while not self._over.wait(1.0 if self._on_terminal else INTERVAL_SECONDS):
            self._write(f"{self._what}: {self.seconds:.0f} s  {self._note}", last=False)

    def _write(self, text: str, *, last: bool) -> None:
        if self._on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="\n" if last else "", flush=True)
        else:
            print(text[:160], flush=True)
