"""A patched SGLang, without the plugin: the same flags, tokens and reports as the installed one with it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import pytest
import sglang_trees

from sglang_sparse import cpu
from sglang_sparse import sglang_compat as compat
from sglang_sparse.options import ENVIRONMENT_VARIABLE
from sglang_sparse.patches.tree import Tree, series_folder

pytestmark = pytest.mark.server

FLAGS = (
    *("--sparse-decode", "--sparse-decode-min-context", "128", "--sparse-decode-window-tokens", "32"),
    *("--sparse-decode-gamma", "0.8", "--page-size", "32", "--chunked-prefill-size", "256"),
)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of the installed release, patched."""
    release = sglang_trees.installed_release()
    if not (series_folder() / f"sglang-{release}").is_dir():
        pytest.skip(f"there are no patches for SGLang {release}")
    tree = sglang_trees.pristine(release, tmp_path_factory.mktemp("patched"))
    assert Tree(tree).change("patched")
    return tree


def first_on_path(tree: Path) -> dict[str, str]:
    """The environment of a process that imports SGLang from `tree`."""
    variables = harness.environment()
    others = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    stubs = [entry for entry in others if entry == str(cpu.STUBS)]
    path = [*stubs, str(tree), *(entry for entry in others if entry not in stubs)]
    # Bytecode is written: this tree is imported many times.
    own = {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "", ENVIRONMENT_VARIABLE: ""}
    return {**variables, **own}


def python(tree: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**first_on_path(tree), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_tokens_are_those_of_the_plugin(start_server: Any, random_llama: Path, patched: Path) -> None:
    environments: list[dict[str, str]] = [{}, {**first_on_path(patched), "SGLANG_PLUGINS": "none"}]
    with ThreadPoolExecutor(2) as pool:
        plugin, fork = pool.map(lambda variables: start_server(random_llama, *FLAGS, **variables), environments)
    generator = random.Random(3)
    prompts = [[generator.randrange(256) for _ in range(length)] for length in (300, 64, 700, 1100)]
    try:
        answers = [server.generate_many(prompts, 24, at_once=1) for server in (plugin, fork)]
        assert [a["output_ids"] for a in answers[1]] == [a["output_ids"] for a in answers[0]]
        with_plugin, without = plugin.idle_info(), fork.idle_info()
        assert without["kept_fraction"] == with_plugin["kept_fraction"] < 0.9
        assert without["options"] == with_plugin["options"]
        assert without["self_check"]["stale_pages"] == 0
        assert "Applied 1 hook(s)" not in fork.log.read_text()
    finally:
        plugin.stop()
        fork.stop()


def test_without_patches_nothing_has_the_flags_but_the_plugin(random_llama: Path) -> None:
    line = harness.command(random_llama, "--sparse-decode")
    environment = harness.environment(SGLANG_PLUGINS="none")
    result = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "unrecognized arguments: --sparse-decode" in result.stderr


def test_the_plugin_does_nothing_in_a_patched_tree_and_says_so(patched: Path) -> None:
    done = python(
        patched,
        "import pkgutil\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry as registry\n"
        "print(dict(registry._hooks), registry._patched)\n"
        "from sglang_sparse import fork, hook_targets\n"
        "targets = {target for targets in hook_targets.by_group().values() for target in targets}\n"
        "[pkgutil.resolve_name(target.rpartition('.')[0]) for target in targets]\n"
        "print(fork.Points._points == targets)",
    )
    assert done.stdout.splitlines()[-2:] == ["{} set()", "True"], done.stderr
    assert "The plugin sparse_decode does nothing: this SGLang is patched for sparse decode." in done.stderr


def test_flags_engine_and_refusals_of_a_patched_tree(patched: Path, random_llama: Path) -> None:
    code = (
        "import os\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        "from sglang_sparse import engine_kwargs\n"
        f"model = {str(random_llama)!r}\n"
        "line = ['--model-path', model, '--device', 'cpu', '--sparse-decode']\n"
        "def show(made): print(made.page_size, made.decode_attention_backend, os.environ.pop(VARIABLE)[:13])\n"
        "show(prepare_server_args([*line, '--sparse-decode-gamma', '0.8']))\n"
        "show(engine_kwargs(model_path=model, device='cpu', sparse_decode_gamma=0.9)['server_args'])\n"
        "prepare_server_args([*line, '--enable-mixed-chunk'])"
    ).replace("VARIABLE", repr(ENVIRONMENT_VARIABLE))
    done = python(patched, code, SGLANG_PLUGINS="none")
    shown = [line for line in done.stdout.splitlines() if compat.BACKEND_NAME in line]
    assert shown == [f'64 {compat.BACKEND_NAME} {{"gamma": {gamma}' for gamma in (0.8, 0.9)], done.stderr
    assert done.returncode == 2
    assert "sglang-sparse: error: --sparse-decode: --enable-mixed-chunk" in done.stderr


def test_a_point_without_a_hook_stops_the_server(patched: Path) -> None:
    code = (
        "from sglang_sparse import hook_targets\n"
        "hook_targets.MAIN_TARGETS += ('sglang.srt.server_args.prepare_server_args',)\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        "prepare_server_args(['--model-path', 'x', '--sparse-decode'])"
    )
    done = python(patched, code, SGLANG_PLUGINS="none")
    assert done.returncode == 2
    assert "the hook on sglang.srt.server_args.prepare_server_args was not applied" in done.stderr


def test_without_sglang_sparse_the_functions_are_what_they_were(patched: Path) -> None:
    points = patched / "sglang" / "srt" / "sparse_decode_points.py"
    code = f"import runpy; print(runpy.run_path({str(points)!r})['sparse_decode_point'](len) is len)"
    # -I and -S leave out the installed packages.
    done = subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
