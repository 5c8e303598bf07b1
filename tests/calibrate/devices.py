"""Tests of the harness run on the CPU, and natively where there is a GPU."""

import pytest

over_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
