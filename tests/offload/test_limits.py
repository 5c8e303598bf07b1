from __future__ import annotations

import resource
from pathlib import Path

import pytest

from sglang_sparse.offload.limits import MemoryLimit, cgroup_limit, host_limit, locked_limit

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 8388608 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_version_2_takes_the_tightest_of_all_levels(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{128 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{10 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {4 * GIB}\n",
        },
    )
    # Files that were only read give way; the machine's total may be below the cgroup's and does not count.
    assert host_limit(root) == MemoryLimit("the cgroup's memory limit", 128 * GIB, 122 * GIB)


def test_version_1_in_a_container_whose_path_is_not_mounted(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{64 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}\n",
        },
    )
    assert cgroup_limit(root) == MemoryLimit("the cgroup's memory limit", 64 * GIB, 64 * GIB - GIB // 2)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"},
        {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
    ],
)
def test_without_a_limit_the_machine_counts(tmp_path: Path, files: dict[str, str]) -> None:
    root = write(tmp_path, files)
    assert cgroup_limit(root) is None
    assert host_limit(root) == MemoryLimit("the machine's memory", 32 * GIB, 8 * GIB)


def test_an_address_space_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path, {"proc/self/statm": "262144 1 1 1 0 1 0\n"})
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4 * GIB, 8 * GIB))
    used = 262144 * resource.getpagesize()
    assert host_limit(root) == MemoryLimit("ulimit -v", 4 * GIB, 4 * GIB - used)
    assert locked_limit() == 4 * GIB


def test_this_machine_has_limits() -> None:
    found = host_limit()
    assert 0 < found.available <= found.limit
