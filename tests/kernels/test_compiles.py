"""Every kernel compiles for a GPU. Triton's interpreter takes kernels that the compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import compile_for_gpu
import pytest
import torch
from compile_cases import CASES

SCRIPT = Path(compile_for_gpu.__file__)
NAMES = [case.name for case in CASES]


@dataclass
class Compiled:
    """What the script said: its results by case, what the compiler said by case, and its exit code."""

    results: dict[str, dict]
    said: dict[str, str]
    code: int

    def failure(self, name: str) -> str | None:
        """Why a case did not compile, with the lines in which the compiler says what is wrong; None if it did."""
        result = self.results.get(name)
        if result is not None and result["ok"]:
            return None
        lines = self.said[name].splitlines()
        if result is None:
            return "\n".join([f"the compiler ended with {self.code}", *lines[-20:]])
        # A pass that fails raises an error that says no more than that.
        return "\n".join([result["error"], *[line for line in lines if "error:" in line][:20]])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    if torch.cuda.is_available():
        pytest.skip("the kernels' own tests compile them for this host's GPU")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=550)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said = [part.partition("\n") for part in f"\n{done.stderr}".split(f"\n{compile_for_gpu.MARK}")]
    assert said[1:], f"nothing was compiled: {done.stderr}"
    return Compiled(
        {result["case"]: result for result in results},
        {name: text for name, _, text in said[1:]},
        done.returncode,
    )


@pytest.mark.parametrize("name", NAMES)
def test_compiles(compiled: Compiled, name: str) -> None:
    if name not in compiled.said:
        pytest.skip(f"the compiler ended before, in {list(compiled.said)[-1]}")
    failure = compiled.failure(name)
    if failure is not None:
        pytest.fail(f"{name} does not compile for sm_{compile_for_gpu.TARGET.arch}:\n{failure}", pytrace=False)


def test_each_operation_has_a_case() -> None:
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []
    missing = compile_for_gpu.operations() - {case.op for case in CASES}
    assert not missing, f"no case compiles {', '.join(sorted(missing))}: add one to compile_cases.py"


def test_each_triton_function_is_compiled(compiled: Compiled) -> None:
    if any(compiled.failure(name) for name in NAMES if name in compiled.said) or compiled.code:
        pytest.skip("a case does not compile")
    reached = {name for result in compiled.results.values() for name in result["functions"]}
    missing = compile_for_gpu.triton_functions() - reached
    assert not missing, f"no case in compile_cases.py compiles {', '.join(sorted(missing))}: add one, or a variant"
