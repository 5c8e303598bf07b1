"""Ports for servers that bind theirs long after it was chosen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from benchmarks.server import ports


@pytest.fixture
def ephemeral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "EPHEMERAL", file)
    return file


@pytest.mark.parametrize("first", [32_768, 20_000])
def test_the_system_gives_it_to_nobody_else(ephemeral: Path, first: int) -> None:
    ephemeral.write_text(f"{first}\t60999\n")
    assert all(ports.LOWEST <= ports.free_port() < first for _ in range(100))


def test_seeds_are_not_shared() -> None:
    chosen = []
    for _ in range(8):
        random.seed(0)
        chosen.append(ports.free_port())
    assert len(set(chosen)) > 1


def test_a_bound_port_is_not_chosen(ephemeral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound is enough, as of the socket of a connection; nothing has to listen."""
    only = ports.free_port()
    monkeypatch.setattr(ports, "LOWEST", only)
    ephemeral.write_text(f"{only + 1}\t60999\n")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", only))
        with pytest.raises(OSError, match=f"none of 200 ports from {only} to {only} was free"):
            ports.free_port()
    assert ports.free_port() == only


@pytest.mark.parametrize("text", ["1024\t65535\n", None])
def test_any_port_where_there_is_no_other_kind(ephemeral: Path, text: str | None) -> None:
    if text is not None:
        ephemeral.write_text(text)
    assert ports.free_port() > 1023
