"""The CPU environment: its stubs, how they reach other processes, and when they stay away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_sparse import cpu

needs_cpu_host = pytest.mark.skipif(torch.cuda.is_available(), reason="stubs stay away from a CUDA host")


def python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Runs code with the stubs first on the path, followed by ``path``."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [cpu.STUBS, *path]))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def output(code: str, *path: Path) -> str:
    done = python(code, *path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_cpu_host
def test_every_name_of_sgl_kernel_imports_and_refuses_to_run() -> None:
    text = output(
        "import sgl_kernel, sgl_kernel.allreduce as reduce\n"
        "from sgl_kernel import rmsnorm\n"
        "from sgl_kernel.flash_attn import flash_attn_varlen_func\n"
        "for kernel in (rmsnorm, flash_attn_varlen_func, reduce.anything):\n"
        "    try: kernel(1, x=2)\n"
        "    except NotImplementedError as error: print(error)\n"
        "print(hasattr(sgl_kernel, '__version__'))"
    )
    why = "is a kernel of SGLang's accelerator library, which this CPU environment replaces by a stub"
    names = ["sgl_kernel.rmsnorm", "sgl_kernel.flash_attn.flash_attn_varlen_func", "sgl_kernel.allreduce.anything"]
    assert text.splitlines() == [*(f"{name} {why}" for name in names), "False"]


@needs_cpu_host
def test_sglang_falls_back_to_its_own_scalar_types() -> None:
    done = python("from sgl_kernel.scalar_type import scalar_types")
    assert "ModuleNotFoundError" in done.stderr


def test_sgl_kernel_steps_aside_for_the_real_one(tmp_path: Path) -> None:
    real = tmp_path / "sgl_kernel"
    real.mkdir()
    (real / "__init__.py").write_text("from . import ops\n__version__ = '9.9'\ndef rmsnorm(): return ops.answer\n")
    (real / "ops.py").write_text("answer = 42\n")
    code = "import sgl_kernel; print(sgl_kernel.__version__, sgl_kernel.rmsnorm(), sgl_kernel.__file__)"
    assert output(code, tmp_path) == f"9.9 42 {real / '__init__.py'}"
    assert "AttributeError" in python("import sgl_kernel; sgl_kernel.unknown", tmp_path).stderr


@needs_cpu_host
def test_torchvision_and_transformers_import() -> None:
    text = output(
        "import torchvision, torch, transformers, torchvision.transforms.v2\n"
        "from transformers.models.auto.processing_auto import AutoProcessor\n"
        "image = torchvision.transforms.v2.functional.resize(torch.zeros(3, 8, 8), [4, 4])\n"
        "print(torchvision.__file__)\nprint(tuple(image.shape), hasattr(torch.ops.torchvision, 'nms'))"
    )
    file, rest = text.splitlines()
    assert not file.startswith(str(cpu.STUBS))
    assert rest == "(3, 4, 4) True"


def test_torchvision_declares_nothing_that_exists(tmp_path: Path) -> None:
    real = tmp_path / "torchvision"
    real.mkdir()
    (real / "extension.py").write_text("def _has_ops(): return True\n")
    (real / "__init__.py").write_text("from . import extension\n")
    code = "import torch, torchvision; print(torchvision.__file__, hasattr(torch.ops.torchvision, 'nms'))"
    assert output(code, tmp_path) == f"{real / '__init__.py'} False"


def test_a_missing_torchvision_stays_missing() -> None:
    # -S leaves out the installed packages; a bare module stands in for torch.
    code = "import sys, types; sys.modules['torch'] = types.ModuleType('torch'); import torchvision"
    environment = {"PYTHONPATH": str(cpu.STUBS)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError: No module named 'torchvision'" in done.stderr


@needs_cpu_host
def test_spawned_processes_have_the_stubs(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing\n"
        "from sglang_sparse import cpu\n"
        "def child():\n"
        "    import os, sgl_kernel\n"
        "    print(sgl_kernel.__file__, os.environ['SGLANG_USE_CPU_ENGINE'])\n"
        "if __name__ == '__main__':\n"
        "    assert cpu.activate() and cpu.activate()\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join()\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "SGLANG_USE_CPU_ENGINE"}
    stubs = str(cpu.STUBS)
    environment["PYTHONPATH"] = os.pathsep.join(
        entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry != stubs
    )
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(cpu.STUBS / "sgl_kernel" / "__init__.py"), "1"], done.stderr


@needs_cpu_host
def test_activating_too_late_is_an_error() -> None:
    code = "import sys, types; sys.modules['sglang'] = types.ModuleType('sglang')\n"
    code += "from sglang_sparse import cpu; sys.path.remove(str(cpu.STUBS)); cpu.activate()"
    assert "has to be called before sglang is imported" in python(code, *map(Path, sys.path)).stderr


@needs_cpu_host
def test_environment_keeps_the_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["first", str(cpu.STUBS), "", "second"]))
    assert cpu.environment()["PYTHONPATH"].split(os.pathsep) == [str(cpu.STUBS), "first", "second"]
    monkeypatch.delenv("PYTHONPATH")
    assert cpu.environment()["PYTHONPATH"] == str(cpu.STUBS)


def test_nothing_on_a_cuda_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = dict(os.environ), list(sys.path)
    assert cpu.environment() == {}
    assert cpu.activate() is False
    assert (dict(os.environ), sys.path) == before


@needs_cpu_host
def test_shell_commands(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "it's here"), *filter(None, sys.path)])}
    command = f'eval "$({sys.executable} -m sglang_sparse.cpu)"; echo "$PYTHONPATH"; echo "$SGLANG_USE_CPU_ENGINE"'
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    path, engine = done.stdout.splitlines()
    assert path.startswith(f"{cpu.STUBS}{os.pathsep}{tmp_path / 'it'}'s here{os.pathsep}")
    assert engine == "1"
