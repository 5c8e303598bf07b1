"""How much host memory this process may take: its cgroups' limits, or else the machine's, less what is in use."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 2**60
"""cgroup v1 writes no limit as a number near 2**63."""


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes of a limit and of what may still be taken, and the name to give it in messages."""

    name: str
    limit: int
    available: int


def _number(path: Path) -> int | None:
    """What a cgroup file holds; None if it is missing or says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < UNLIMITED else None


def _field(path: Path, name: str) -> int:
    """A field of `memory.stat`; 0 if it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)


def _folders(mount: Path, path: str) -> Iterator[Path]:
    """The cgroup's folder and those above it, up to the mount; in a container the path may lie outside of it."""
    folder = mount / path.lstrip("/")
    while folder != mount and mount in folder.parents:
        yield folder
        folder = folder.parent
    yield mount


def cgroup_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The tightest limit of the process's cgroup and those above it, version 2 or 1; None if there is none."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = []
    for entry in entries:
        _, _, rest = entry.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount, names, cached = root / "sys/fs/cgroup", ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names, cached = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        else:
            continue
        for folder in _folders(mount, path):
            limit, used = _number(folder / names[0]), _number(folder / names[1]) or 0
            if limit is None:
                continue
            # Files that were read lately count as used, and give way.
            used = max(0, used - _field(folder / "memory.stat", cached))
            found.append(MemoryLimit("the cgroup's memory limit", limit, max(0, limit - used)))
    return min(found, key=lambda each: each.available, default=None)


def machine_limit(root: Path = Path("/")) -> MemoryLimit:
    """All of the machine's memory, and what is available of it."""
    fields = dict.fromkeys(("MemTotal", "MemAvailable"), 0)
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in fields:
            fields[name] = int(rest.split()[0]) << 10
    return MemoryLimit("the machine's memory", fields["MemTotal"], fields["MemAvailable"])


def host_limit(root: Path = Path("/")) -> MemoryLimit:
    """What bounds host memory: the cgroup's limit if there is one. The machine's total does not count then, since
    memory may be added to a machine as a cgroup needs it; an address-space limit (`ulimit -v`) counts in any case."""
    found = cgroup_limit(root) or machine_limit(root)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        left = max(0, soft - _address_space(root))
        if left < found.available:
            found = MemoryLimit("ulimit -v", soft, left)
    return found


def _address_space(root: Path) -> int:
    pages = int((root / "proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def locked_limit() -> int | None:
    """Bytes that `ulimit -l` lets this process lock; None without a limit.

    The CUDA driver pins pages on its own account, so this does not bound pinned memory by itself: it is named when
    pinning fails.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
