"""What a soak counts."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path


@dataclasses.dataclass
class Report:
    """What a soak counted; `failures` is empty if all is well."""

    mode: str
    scale: str
    seed: int
    rounds: int = 0
    requests: int = 0
    refused: int = 0
    aborted: int = 0
    disconnected: int = 0
    pauses: int = 0
    changes: int = 0
    flush_attempts: int = 0
    retractions: int = 0
    evicted_tokens: int = 0
    prefix_hits: int = 0
    checked_answers: int = 0
    checked_tokens: int = 0
    unchecked_answers: int = 0
    exempt_tokens: int = 0
    border_requests: int = 0
    """Prompts that have such tokens."""
    border_tokens: int = 0
    """Chosen by a rounding of what codes and lists of blocks are made from (soak_border.py)."""
    wrong_tokens: int = 0
    leaks: int = 0
    self_checks: int = 0
    memory_mib: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    borders: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)


def line(report: Report) -> str:
    return (
        f"round {report.rounds}: {report.requests} requests, {report.aborted} aborted, {report.retractions} retracted, "
        f"{report.evicted_tokens} tokens evicted, {report.prefix_hits} prefix hits, {report.checked_tokens} checked, "
        f"{report.wrong_tokens} wrong, {report.exempt_tokens} exempt, "
        f"{report.border_tokens} on a border in {report.border_requests} requests, {report.leaks} leaks, "
        f"{report.memory_mib[-1] if report.memory_mib else 0:.0f} MiB"
    )


def write(report: Report, path: Path) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")
    os.replace(partial, path)
