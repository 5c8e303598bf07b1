"""Stands in for SGLang's kernel library on a host without a GPU.

SGLang imports names from ``sgl_kernel`` at module level and calls them only on accelerators. Here every name imports,
and raises when it is called. If a real ``sgl_kernel`` is installed, this module steps aside and becomes that one.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_STUBS = Path(__file__).resolve().parent.parent
# Holds data types rather than kernels; SGLang has its own substitute for it when the import fails.
_NOT_PROVIDED = (f"{__name__}.scalar_type",)


def _missing(name: str) -> type:
    """A class, so that it also serves in annotations and ``isinstance``, whose call raises."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} is a kernel of SGLang's accelerator library, which this CPU environment replaces by a stub"
        )

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__module__": name.rpartition(".")[0]})


class _StubModule(ModuleType):
    """A submodule whose every public name is a kernel that refuses to run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = _missing(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _StubFinder:
    """Finds ``sgl_kernel.<anything>``, once the package itself is the stub."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}.") or fullname in _NOT_PROVIDED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _real_package() -> importlib.machinery.ModuleSpec | None:
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _STUBS]
    return importlib.machinery.PathFinder.find_spec(__name__, others)


_real = _real_package()
if _real is not None and _real.loader is not None:
    __spec__, __file__, __path__ = _real, _real.origin, _real.submodule_search_locations
    _real.loader.exec_module(sys.modules[__name__])
else:
    sys.modules[__name__].__class__ = _StubModule
    sys.meta_path.append(_StubFinder())
