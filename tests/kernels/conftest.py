"""Kernel tests run natively on a GPU and in Triton's interpreter elsewhere; tests/conftest.py makes the choice."""

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter computes in numpy, which warns of the logarithm of an empty block and of the infinities that tests
    # put in.
    config.addinivalue_line("filterwarnings", "ignore:invalid value encountered in subtract:RuntimeWarning")
    config.addinivalue_line("filterwarnings", "ignore:divide by zero encountered in log2:RuntimeWarning")
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
