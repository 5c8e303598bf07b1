"""Hooks of the plugin take their place whatever another plugin did to SGLang's functions, wherever these are used."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_sparse import cpu, plugin
from sglang_sparse.options import ENVIRONMENT_VARIABLE, OptionsError, SparseDecodeOptions

MODULE = "sglang_of_a_test"
TARGET = f"{MODULE}.function"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a function to hook, which adds its name to a list; nothing is hooked."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(plugin, "_hooked", set())
    monkeypatch.setattr(plugin, "HookRegistry", HookRegistry)
    monkeypatch.setattr(plugin, "HookType", HookType)
    (tmp_path / f"{MODULE}.py").write_text("def function(calls):\n    calls.append('function')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return importlib.import_module(MODULE)


def named(name: str) -> Any:
    def hook(original: Any, calls: list[str]) -> None:
        calls.append(name)
        original(calls)

    return hook


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("kind", [HookType.AROUND, HookType.REPLACE])
def test_a_hook_goes_around_what_another_plugin_did(module: Any, applied: bool, kind: HookType) -> None:
    other = named("other") if kind is HookType.AROUND else lambda calls: calls.append("other")
    HookRegistry.register(TARGET, other, kind)
    if applied:
        HookRegistry.apply_hooks()
    plugin._install(SparseDecodeOptions(), {TARGET: named("ours")})
    # Engine and command line install theirs one after the other.
    plugin._install(SparseDecodeOptions(), {TARGET: named("again")})
    calls: list[str] = []
    module.function(calls)
    assert calls == ["ours", "other", *(["function"] if kind is HookType.AROUND else [])]


def test_another_plugins_hook_is_not_taken_for_ours(module: Any) -> None:
    HookRegistry.register(TARGET, named("other"), HookType.AROUND)
    HookRegistry.apply_hooks()
    with pytest.raises(OptionsError, match=f"the hook on {TARGET} was not applied"):
        plugin._verify_hooks((TARGET,))


STALE = """
import json, pkgutil, sys, types
from sglang_sparse import hook_targets

# Everything that might take a function by `from ... import` is imported before the hooks are applied.
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.managers.tp_worker

targets = hook_targets.MAIN_TARGETS + hook_targets.SCHEDULER_TARGETS
originals = {}
for target in targets:
    owner, _, name = target.rpartition(".")
    originals[target] = vars(pkgutil.resolve_name(owner))[name]

# SGLang 0.5.17 takes none of them so: a module that does.
taker = sys.modules["taker"] = types.ModuleType("taker")
taker.create = originals[hook_targets.CREATE_POOL_CONFIGURATOR]

from sglang.srt.plugins import load_plugins

load_plugins()
found = []
for module in list(sys.modules.values()):
    holders = [module, *(value for value in list(vars(module).values()) if isinstance(value, type))]
    for holder in holders:
        for name, value in list(vars(holder).items()):
            found += [f"{target} in {holder}.{name}" for target, kept in originals.items() if value is kept]
print(json.dumps([len(originals), found]))
"""


def test_no_module_keeps_a_function_as_it_was_before_its_hook() -> None:
    options = SparseDecodeOptions().to_json()
    result = subprocess.run(
        [sys.executable, "-c", STALE],
        env={**os.environ, **cpu.environment(), ENVIRONMENT_VARIABLE: options},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout.splitlines()[-1]) == [15, []]
