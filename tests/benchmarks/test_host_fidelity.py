"""What `host-fidelity` rounds: full pages of the prompt, as a host pool does, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sparse_kernels import pack_blocks, unpack_blocks

from benchmarks.__main__ import main
from benchmarks.host_fidelity import PAGE_SIZE, rounded, roundings


@pytest.mark.parametrize("name", ["as it is", "bfloat16", "fp8_e4m3"])
def test_full_pages_are_rounded_in_a_copy(name: str) -> None:
    k, v = torch.randn(2, 400, 3, 64), 9 * torch.randn(2, 400, 3, 64)
    before = k.clone(), v.clone()
    prefix = SimpleNamespace(k=k, v=v, length=3 * PAGE_SIZE + 5)
    made = rounded(prefix, roundings()[name], first=128)
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])
    full = slice(128, 128 + 3 * PAGE_SIZE)
    for pool, old in ((made.k, k), (made.v, v)):
        assert torch.equal(pool[:, :128], old[:, :128])
        assert torch.equal(pool[:, full.stop :], old[:, full.stop :])
        assert torch.equal(pool[:, full], old[:, full]) == (name == "as it is")
    # A block of one token, keys before values.
    one = torch.stack((k[1, 150], v[1, 150]), 1)[:, :, None]
    if name == "fp8_e4m3":
        back = unpack_blocks(pack_blocks(one), 1, torch.float32)[:, :, 0]
        assert torch.equal(torch.stack((made.k[1, 150], made.v[1, 150]), 1), back)


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    assert main(["host-fidelity", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("benchmarks host-fidelity: ")
