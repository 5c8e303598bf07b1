"""Points of a patched SGLang, and the registry that stands in for SGLang's own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from sglang_sparse import fork, plugin
from sglang_sparse.fork import PointKind, Points
from sglang_sparse.sglang_compat import POINTS_MODULE


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Nothing registered; yields how often the plugin was installed."""
    installed: list[int] = []
    for name, empty in (("_points", set()), ("_hooks", {}), ("_patched", set())):
        monkeypatch.setattr(Points, name, empty)
    monkeypatch.setattr(plugin, "install", lambda: installed.append(1))
    fork.install.cache_clear()
    yield installed
    fork.install.cache_clear()


def double(value: int) -> int:
    """Twice the value."""
    return 2 * value


class Holder:
    """Methods as SGLang's patched classes have them."""

    @classmethod
    @fork.sparse_decode_point
    def of_class(cls, value: int) -> tuple:
        return cls, value

    @staticmethod
    @fork.sparse_decode_point
    def static(value: int) -> int:
        return value


TARGET = f"{__name__}.double"


def test_a_point_calls_the_function_until_a_hook_is_registered(empty_registry: list[int]) -> None:
    point = fork.sparse_decode_point(double)
    assert not empty_registry, "installed at import"
    assert (point(2), point.__doc__, point.__wrapped__) == (4, "Twice the value.", double)
    Points.register(TARGET, lambda original, value: original(value) + 1, PointKind.AROUND)
    assert point(value=2) == 5
    assert empty_registry == [1]


def test_points_in_classes() -> None:
    for name in ("of_class", "static"):
        target = f"{__name__}.Holder.{name}"
        Points.register(target, lambda original, *args: (original(*args), "hooked"), PointKind.AROUND)
    assert Holder.of_class(1) == ((Holder, 1), "hooked")
    assert Holder.static(1) == (1, "hooked")


def test_only_hooks_with_a_point_are_in_place(caplog: pytest.LogCaptureFixture) -> None:
    fork.sparse_decode_point(double)
    missing = "sglang_sparse.no_such_module.function"
    for target in (TARGET, "sglang_sparse.fork.install", missing):
        Points.register(target, lambda original: None, PointKind.AROUND)
    Points.apply_hooks()
    assert Points._patched == {TARGET}
    assert "SGLang's sglang_sparse.fork.install is not marked" in caplog.text
    assert f"SGLang has no {missing}" in caplog.text


def test_one_hook_a_point() -> None:
    Points.register(TARGET, lambda original: None, PointKind.AROUND)
    with pytest.raises(ValueError, match=TARGET):
        Points.register(TARGET, lambda original: None, PointKind.AROUND)
    with pytest.raises(ValueError, match="AROUND"):
        Points.register("other.target", lambda original: None, object())  # type: ignore[arg-type]


def test_the_plugin_installs_nothing_in_a_patched_sglang(
    empty_registry: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin.compat, "is_patched", lambda: True)
    plugin.register()
    assert not empty_registry
    assert "The plugin sparse_decode does nothing" in caplog.text
    monkeypatch.setattr(plugin.compat, "is_patched", lambda: False)
    plugin.register()
    assert empty_registry == [1]


@pytest.mark.parametrize(
    ("marker", "arguments", "expected"),
    [
        (True, f"from {POINTS_MODULE} import sparse_decode_point\n", True),
        # Another release was installed over a patched one.
        (True, "import argparse\n", False),
        (False, "import argparse\n", False),
    ],
)
def test_a_tree_is_patched_if_it_uses_the_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: bool, arguments: str, expected: bool
) -> None:
    (tmp_path / "server_args.py").write_text(arguments)
    if marker:
        (tmp_path / "sparse_decode_points.py").write_text("")

    def find(name: str) -> ModuleSpec | None:
        file = tmp_path / f"{name.rpartition('.')[2]}.py"
        return spec_from_file_location(name, file) if file.exists() else None

    monkeypatch.setattr("importlib.util.find_spec", find)
    assert plugin.compat.is_patched() is expected


@pytest.mark.parametrize(
    ("title", "registers"),
    [("sglang::detokenizer", False), ("sglang::data_parallel_controller", False), ("sglang::scheduler", True)],
)
def test_processes_without_a_model(monkeypatch: pytest.MonkeyPatch, title: str, registers: bool) -> None:
    monkeypatch.setattr("setproctitle.getproctitle", lambda: title)
    assert plugin.compat.decodes_nothing() is not registers
