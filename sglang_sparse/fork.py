"""Sparse decode in a patched SGLang, which calls it from its own functions instead of loading the plugin.

The patches in `patches/` mark the functions that the plugin would hook with `sparse_decode_point`. `Points` and
`PointKind` stand there for SGLang's registry of hooks, which only `plugin` uses: it registers the same functions with
them, and the points call these.
Imports nothing of SGLang, which imports this first.
"""

from __future__ import annotations

import enum
import functools
import logging
import pkgutil
from collections.abc import Callable
from typing import Any, ClassVar

logger = logging.getLogger(__name__)


class PointKind(enum.Enum):
    """The kinds of hooks that points can call."""

    AROUND = "around"


class Points:
    """What the points of this process call, by target: the function's dotted path. Used as SGLang's registry is."""

    _points: ClassVar[set[str]] = set()
    """Targets that SGLang has a point at, as far as their modules are imported."""
    _hooks: ClassVar[dict[str, Callable]] = {}
    _patched: ClassVar[set[str]] = set()
    """Targets whose hook is in place."""

    @classmethod
    def register(cls, target: str, hook: Callable, kind: PointKind) -> None:
        """Makes the point at `target` call `hook(original, *args, **kwargs)`; there can be one.

        Raises:
            ValueError: if there is one already, or `kind` is not AROUND.
        """
        if kind is not PointKind.AROUND or target in cls._hooks:
            raise ValueError(f"a patched SGLang has one AROUND hook at {target}, and no other")
        cls._hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        """Notes which hooks are in place. Those that are not are logged: SGLang lacks the function, or its point."""
        for target in cls._hooks.keys() - cls._patched:
            try:
                pkgutil.resolve_name(target.rpartition(".")[0])
            except (ImportError, AttributeError):
                logger.exception("SGLang has no %s", target)
            if target in cls._points:
                cls._patched.add(target)
            else:
                logger.error("SGLang's %s is not marked: revert its patches and apply those of this version", target)


@functools.cache
def install() -> None:
    """Registers what the plugin would hook in this process, once; ends the process if that fails."""
    from sglang_sparse import plugin

    plugin.install()
    Points.apply_hooks()


def sparse_decode_point(function: Callable) -> Callable:
    """Decorator of a function of SGLang: calls go to the hook registered for it, if there is one."""
    target = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def point(*args: Any, **kwargs: Any) -> Any:
        # Not at import: SGLang is half imported then, and the options may not be in the environment yet.
        install()
        hook = Points._hooks.get(target)
        return function(*args, **kwargs) if hook is None else hook(function, *args, **kwargs)

    Points._points.add(target)
    return point
