"""Compiles the calls of `compile_cases` for a GPU of compute capability 9.0, on a host that needs none.

    compile_for_gpu.py [case ...]

Triton's interpreter, which runs the kernels in tests without a GPU, knows nothing of Triton's types: a loop-carried
variable that changes its shape, for one, only fails to compile. Here a driver that stands in for CUDA's names the
target, and every launch compiles its kernel and stops there. Writes a line of JSON for each case: `case`, `ok`,
`error`, and `functions`, the Triton functions that it compiled. What the compiler has to say about a case comes on the
standard error after a line `MARK` + its name.

Kernels go all the way to machine code: ptxas alone reads the kernels' inline assembly, and takes a fifth of the time.
The compiler's switches that leave optimisations out save nothing worth having: unoptimised code is longer, and ptxas
takes more for it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import pkgutil
import re
import sys
from types import ModuleType
from typing import Any

import sparse_kernels
from compile_cases import CASES
from sparse_kernels._dispatch import INTERPRETED
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MARK = "== compiling "
TARGET = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 * 1024
"""Shared memory that a program may have at compute capability 9.0. More is an error at launch only."""

_CALLED = re.compile(r'@"?(sparse_kernels\.\w+?\.\w+?)__')
"""In a kernel's first form, functions have their names, then two underscores and the types of their arguments."""


class _Driver:
    """As much of Triton's driver as compiling takes."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def modules() -> list[ModuleType]:
    """All modules of the package."""
    found = pkgutil.iter_modules(sparse_kernels.__path__, "sparse_kernels.")
    return [importlib.import_module(each.name) for each in found]


def triton_functions() -> set[str]:
    """Names, with their modules', of all functions of the package that Triton compiles or interprets."""
    names = set()
    for module in modules():
        for value in vars(module).values():
            if type(value).__name__ in ("JITFunction", "InterpretedFunction"):
                names.add(f"{value.fn.__module__}.{value.fn.__name__}")
    return {name for name in names if name.startswith("sparse_kernels.")}


def operations() -> set[str]:
    """Names of the public operations that have a Triton kernel: those with a choice of `impl`."""
    functions = {name: getattr(sparse_kernels, name) for name in sparse_kernels.__all__}
    return {
        name
        for name, each in functions.items()
        if inspect.isroutine(each) and "impl" in inspect.signature(each).parameters
    }


def _compile_instead_of_launching(compiled: set[str]) -> None:
    """From here on launches compile, and add the names of what they compiled to `compiled`."""
    driver.set_active(_Driver())
    run = JITFunction.run

    def compile_only(self: JITFunction, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        compiled.add(f"{self.fn.__module__}.{self.fn.__name__}")
        compiled.update(_CALLED.findall(kernel.asm["source"]))
        if kernel.metadata.shared > MAX_SHARED_BYTES:
            raise ValueError(
                f"{kernel.name} takes {kernel.metadata.shared} bytes of shared memory of {MAX_SHARED_BYTES}"
            )

    JITFunction.run = compile_only
    for module in modules():
        if hasattr(module, "use_triton"):
            module.use_triton = lambda impl, tensor: True


def _message(error: BaseException | None) -> str:
    """An error and what it came from: the compiler tells of a callee's error as the cause of its caller's."""
    parts = []
    while error is not None:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "\n".join(parts)


def main(chosen: list[str]) -> None:
    if INTERPRETED:
        sys.exit("TRITON_INTERPRET is set: nothing would be compiled")
    compiled: set[str] = set()
    _compile_instead_of_launching(compiled)
    for case in CASES:
        if chosen and case.name not in chosen:
            continue
        print(MARK + case.name, file=sys.stderr, flush=True)
        compiled.clear()
        error = None
        try:
            # Triton prints the code that ptxas refuses.
            with contextlib.redirect_stdout(sys.stderr):
                case.call()
        except Exception as raised:
            error = _message(raised)
        result = {"case": case.name, "ok": error is None, "error": error, "functions": sorted(compiled)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
