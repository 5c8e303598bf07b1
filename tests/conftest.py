"""What all tests share: the CPU environment on hosts without a GPU, the ``gpu`` marker, and free ports."""

import os

import pytest
import torch

from benchmarks.server import ports
from sglang_sparse import cpu

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    # GPU hosts may lack it: kernel tests run without.
    pass
else:
    # A busy machine is slow, which is no fault of what is tested; a run that fails fails again.
    settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")

# Kernels run in Triton's interpreter without a GPU. That is decided when triton is first imported, by whichever test
# module comes first.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# At import, so that it comes before any test module imports SGLang; child processes inherit it.
cpu.activate()

# Tensors are small, and the threads of several servers on few cores mostly wait for each other. Servers inherit it.
if not torch.cuda.is_available():
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Workers of `-n auto`: a GPU has no memory for several servers, and many servers on few cores time out."""
    return 0 if torch.cuda.is_available() else min(2, len(os.sched_getaffinity(0)))


@pytest.fixture
def free_port() -> int:
    return ports.free_port()
