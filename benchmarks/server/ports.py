"""A TCP port for a server that is about to start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10_000
LOST = "error while attempting to bind on address"
"""What a server's log says if another took its port. SGLang's processes stay all the same, and answer nothing."""

# Not the seeded generator: two processes that seed it alike would choose the same ports.
_generator = random.SystemRandom()


def free_port(tries: int = 200) -> int:
    """A port of the loopback address that nothing is bound to, and that the system gives to nobody by itself.

    A server binds its port only once it has loaded its model. Until then a port of the ephemeral range may become that
    of any connection, or of any socket bound to port 0 (SGLang binds one for its process group), on this host.

    Raises:
        OSError: none of `tries` ports was free.
    """
    first_ephemeral = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32_768
    # Where the ephemeral range begins lower, there are no ports of the kind: 0 takes any that is free.
    choices = range(LOWEST, first_ephemeral) if first_ephemeral > LOWEST else (0,)
    refused: OSError | None = None
    for _ in range(tries):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", _generator.choice(choices)))
            except OSError as error:
                refused = error
            else:
                port: int = probe.getsockname()[1]
                return port
    raise OSError(f"none of {tries} ports from {choices[0]} to {choices[-1]} was free") from refused
