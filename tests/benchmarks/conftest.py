"""A server that answers as SGLang does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import FakeServer, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running
