"""Sparse decode beside another plugin that hooks the same functions first, and with and without the prefix cache."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_sparse import cpu, hook_targets, sglang_compat

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(sglang_compat.is_patched(), reason="a patched SGLang has no hooks"),
]

FLAGS = (
    *("--sparse-decode", "--sparse-decode-min-context", "128", "--sparse-decode-window-tokens", "32"),
    *("--sparse-decode-gamma", "0.8", "--page-size", "32", "--chunked-prefill-size", "256"),
    *("--max-total-tokens", "4096"),
)
TOKENS = 24
# Hooks everything that sparse decode hooks, and applies its hooks by itself: SGLang would do so once for all plugins.
PLUGIN = """
import sys

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def around(target):
    seen = []
    def hook(original, *args, **kwargs):
        if not seen:
            seen.append(1)
            print("other plugin:", target, file=sys.stderr, flush=True)
        return original(*args, **kwargs)
    return hook

def register():
    for target in {targets}:
        HookRegistry.register(target, around(target), HookType.AROUND)
    HookRegistry.apply_hooks()
"""


def write_plugin(folder: Path) -> str:
    """An installed plugin in `folder`; returns the `PYTHONPATH` that shows it to SGLang before all others."""
    targets = tuple(target for group in hook_targets.by_group().values() for target in group)
    (folder / "other_plugin.py").write_text(PLUGIN.format(targets=repr(targets)))
    installed = folder / "other_plugin-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[sglang.srt.plugins]\nother = other_plugin:register\n")
    inherited = cpu.environment().get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(entry for entry in (str(folder), inherited) if entry)


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def servers(start_server: Any, random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """With the other plugin, and without it and without prefix cache."""
    path = write_plugin(tmp_path_factory.mktemp("plugin"))
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(start_server, random_llama, *FLAGS, PYTHONPATH=path)
        uncached = pool.submit(start_server, random_llama, *FLAGS, "--disable-radix-cache")
        return beside.result(), uncached.result()


def test_hooks_of_two_plugins_are_all_in_place(servers: tuple[Any, Any]) -> None:
    server, _ = servers
    answer = server.generate(prompt(1, 400), 8)
    assert answer["meta_info"]["sparse_decode"]["kept_fraction"] < 1
    assert requests.get(f"{server.url}/sparse_decode", timeout=60).json()["since_change"]["steps"] > 0
    sampling = {"max_new_tokens": 4, "custom_params": {"sparse_decode": {"gamma": 2}}}
    response = server.post("/generate", {"input_ids": prompt(2, 200), "sampling_params": sampling})
    assert response.status_code == 400
    assert "custom_params.sparse_decode.gamma" in response.text
    log = server.log.read_text()
    for target in (hook_targets.FROM_CLI_ARGS, hook_targets.GENERATE_REQUEST, hook_targets.RUN_BATCH):
        assert f"other plugin: {target}" in log


def test_answers_are_the_same_with_and_without_prefix_cache(servers: tuple[Any, Any]) -> None:
    cached, uncached = servers
    cached.flush()
    shared = prompt(3, 1100)
    # Prefixes end within a page, at its border, and within the window.
    asked = [shared[:length] + prompt(10 + length, 30) for length in (700, 704, 300, 1088, 1100, 333)]
    answers = [[server.generate(each, TOKENS) for each in asked] for server in (cached, uncached)]
    assert [each["output_ids"] for each in answers[0]] == [each["output_ids"] for each in answers[1]]
    assert len({tuple(each["output_ids"]) for each in answers[0]}) == len(asked), "answers do not depend on the prompt"
    assert [each["meta_info"]["cached_tokens"] > 0 for each in answers[0]] == [False, *[True] * 5]
    assert not any(each["meta_info"]["cached_tokens"] for each in answers[1])
    assert all(each["meta_info"]["sparse_decode"]["kept_fraction"] < 1 for each in answers[0])


def test_equal_prompts_at_once_keep_one_copy_and_the_same_answer(servers: tuple[Any, Any]) -> None:
    """Each is prefilled by itself; the prefix cache then frees all copies but one, while the requests go on."""
    cached, _ = servers
    cached.flush()
    asked = prompt(50, 500)
    (alone,) = cached.generate_many([asked], 80, at_once=1)
    cached.flush()
    answers = cached.generate_many([asked] * 4, 80, at_once=4)
    assert [each["output_ids"] for each in answers] == [alone["output_ids"]] * 4
    check = cached.idle_info()["self_check"]
    assert check["free_tokens"] + check["cached_tokens"] == check["total_tokens"]
    assert check["stale_pages"] == 0


def test_several_long_requests_at_once_all_end(servers: tuple[Any, Any]) -> None:
    """Each is a third of the pool, and all come at the same time: some wait, some grow out of it."""
    for server in servers:
        answers = server.generate_many([prompt(100 + seed, 1300) for seed in range(6)], 90, at_once=6)
        assert [each["meta_info"]["completion_tokens"] for each in answers] == [90] * 6
        check = server.idle_info()["self_check"]
        assert check["free_tokens"] + check["cached_tokens"] == check["total_tokens"]
        assert check["stale_pages"] == 0
