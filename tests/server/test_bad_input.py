"""What cannot work is refused at start: one line that names the flag or the model, exit code not 0."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import harness
import pytest

from sglang_sparse import cpu, sglang_compat
from sglang_sparse.options import ENVIRONMENT_VARIABLE

pytestmark = pytest.mark.server


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, random_llama: Path) -> Any:
    """SGLang's argument handling with the plugin loaded, as `launch_server` runs it."""
    cpu.activate()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    # A restored variable would make later tests' processes decode sparsely.
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")

    def run(*flags: str, model: Path = random_llama) -> Any:
        device = () if harness.ON_CUDA else ("--device", "cpu")
        return prepare_server_args(["--model-path", str(model), *device, *flags])

    return run


def assert_refused(prepare: Any, capsys: pytest.CaptureFixture, flags: list[str], named: str, **kwargs: Any) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        prepare(*flags, **kwargs)
    assert caught.value.code not in (0, None)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sglang-sparse: error: ")]
    assert len(lines) == 1
    assert named in lines[0]
    assert not os.environ.get(ENVIRONMENT_VARIABLE)


FLAGS = [
    ("--sparse-decode-gamma 0", "--sparse-decode-gamma"),
    ("--sparse-decode-gamma 1.5", "--sparse-decode-gamma"),
    ("--sparse-decode-estimator magic", "--sparse-decode-estimator"),
    ("--sparse-decode-rule magic", "--sparse-decode-rule"),
    ("--sparse-decode-rule top-k --sparse-decode-top-k 0", "--sparse-decode-top-k"),
    ("--sparse-decode-kv-format int8", "--sparse-decode-kv-format is 'int8'"),
    ("--sparse-decode-kv-format split --kv-cache-dtype fp8_e5m2", "go with --kv-cache-dtype fp8_e5m2"),
    ("--sparse-decode-kv-format split --sparse-decode-offload", "split does not go with --sparse-decode-offload"),
    ("--sparse-decode-rule top-k", "--sparse-decode-top-k"),
    ("--sparse-decode-config /nonexistent.json", "--sparse-decode-config"),
    ("--sparse-decode-config /", "--sparse-decode-config '/'"),
    ("--sparse-decode-dense-layers 0,2", "--sparse-decode-dense-layers names layer 2"),
    ("--sparse-decode-gamma-by-layer 0.9", "--sparse-decode-gamma-by-layer has 1 values"),
    ("--sparse-decode-audit-rate 2", "--sparse-decode-audit-rate"),
    ("--page-size 8", "--page-size 8"),
    ("--page-size 1", "--page-size 1 "),
    ("--page-size 16 --sparse-decode-block-size 32", "--sparse-decode-block-size 32"),
    *((f"--speculative-algorithm {name}", "verifies drafts densely") for name in ("NGRAM", "EAGLE", "EAGLE3", "NEXTN")),
    ("--speculative-algorithm STANDALONE", "remove --speculative-algorithm"),
    ("--disaggregation-mode decode", "remove --disaggregation-mode"),
    ("--disaggregation-mode prefill", "remove --disaggregation-mode"),
    ("--enable-mixed-chunk", "--enable-mixed-chunk"),
    ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype"),
    ("--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype"),
    ("--tokenizer-worker-num 2", "--tokenizer-worker-num"),
    ("--pp-size 2", "--pp-size"),
    *(
        (f"--tp-size 2 {flags}", named)
        for flags, named in (
            ("--sparse-decode-offload", "--sparse-decode-offload has not been tested with --tp-size 2"),
            ("--sparse-decode-kv-format split", "--sparse-decode-kv-format split has not been tested with --tp-size 2"),
            ("--sparse-decode-select-by forecast", "--sparse-decode-select-by forecast has not"),
            ("--enable-lora", "--enable-lora has not been tested with --tp-size 2"),
            ("--enable-dp-attention --dp-size 2", "--dp-size"),
            ("--nnodes 2 --node-rank 0", "--nnodes"),
        )
        if sglang_compat.has_tested_ranks()
    ),
    ("--tp-size 4", "--tp-size"),
    ("--enable-pdmux", "--enable-pdmux"),
    ("--enable-two-batch-overlap", "--enable-two-batch-overlap"),
    ("--cuda-graph-backend-prefill full", "--cuda-graph-backend-prefill"),
    ('--cuda-graph-config {"prefill":{"backend":"full"}}', "--cuda-graph-backend-prefill"),
    ("--decode-attention-backend triton", "--decode-attention-backend"),
    ("--attention-backend flex_attention", "--attention-backend"),
    ("--enable-hierarchical-cache", "have no summaries: remove --enable-hierarchical-cache"),
    ("--enable-lmcache", "have no summaries: remove --enable-lmcache"),
    ("--hicache-ratio 3", "--hicache-ratio"),
    ("--enable-hisparse", "--enable-hisparse"),
    ("--enable-lora-overlap-loading", "--enable-lora-overlap-loading"),
    ("--lora-use-virtual-experts", "--lora-use-virtual-experts"),
    ("--dp-size 2", "--dp-size"),
    ("--enable-dp-attention", "--enable-dp-attention"),
    ("--enable-torch-compile", "--enable-torch-compile"),
    ("--enable-memory-saver", "--enable-memory-saver"),
]


@pytest.mark.parametrize(("flags", "named"), FLAGS, ids=[flags for flags, _ in FLAGS])
def test_flags_that_do_not_go_together(prepare: Any, capsys: pytest.CaptureFixture, flags: str, named: str) -> None:
    harness.skip_unless_served(flags.split())
    assert_refused(prepare, capsys, ["--sparse-decode", *flags.split()], named)


def test_an_option_without_sparse_decode(prepare: Any, capsys: pytest.CaptureFixture) -> None:
    assert_refused(prepare, capsys, ["--sparse-decode-gamma", "0.9"], "--sparse-decode-gamma")


def test_environment_variables_that_change_the_pool(
    prepare: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert_refused(prepare, capsys, ["--sparse-decode"], "SGLANG_USE_HND_KVCACHE")


def with_config(source: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a model with a changed configuration."""
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MODELS = [
    ({"attn_logit_softcapping": 50.0}, "soft-capping"),
    ({"head_dim": 80}, "head dim 80"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"architectures": ["XverseForCausalLM"]}, "XverseForCausalLM has not been tested"),
    (
        {
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            "kv_lora_rank": 64,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
        "MLA",
    ),
]


@pytest.mark.parametrize(("changes", "named"), MODELS, ids=[named for _, named in MODELS])
def test_models_that_are_not_supported(
    prepare: Any,
    capsys: pytest.CaptureFixture,
    random_llama: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    named: str,
) -> None:
    model = with_config(random_llama, tmp_path, **changes)
    assert_refused(prepare, capsys, ["--sparse-decode"], named, model=model)


def test_what_is_accepted_sets_page_size_and_backend(prepare: Any) -> None:
    arguments = prepare("--sparse-decode", "--sparse-decode-gamma", "0.9")
    assert arguments.page_size == 64
    assert arguments.decode_attention_backend == "sparse_decode"
    assert json.loads(os.environ[ENVIRONMENT_VARIABLE])["gamma"] == 0.9
    assert prepare("--sparse-decode", "--page-size", "32").page_size == 32


def test_without_the_flag_nothing_changes(prepare: Any) -> None:
    arguments = prepare()
    assert arguments.decode_attention_backend is None
    assert not os.environ[ENVIRONMENT_VARIABLE]


def test_engine_kwargs_checks_like_the_command_line(prepare: Any, random_llama: Path) -> None:
    from sglang_sparse import OptionsError, engine_kwargs

    device = {} if harness.ON_CUDA else {"device": "cpu"}
    arguments = engine_kwargs(model_path=str(random_llama), sparse_decode_gamma=0.9, **device)["server_args"]
    assert (arguments.page_size, arguments.decode_attention_backend) == (64, "sparse_decode")
    assert json.loads(os.environ[ENVIRONMENT_VARIABLE])["gamma"] == 0.9
    engine_kwargs(model_path=str(random_llama), enable_lmcache=False, page_size=None, **device)
    with pytest.raises(OptionsError, match="gamme"):
        engine_kwargs(model_path=str(random_llama), sparse_decode_gamme=0.9, **device)
    with pytest.raises(OptionsError, match="--enable-mixed-chunk"):
        engine_kwargs(model_path=str(random_llama), enable_mixed_chunk=True, **device)


def test_an_untested_release_needs_its_flag(
    prepare: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.99" if name == "sglang" else version(name))
    named = "SGLang 0.5.99 has not been tested with --sparse-decode: install one of 0.5.17, 0.5.20, 0.5.23, or add"
    assert_refused(prepare, capsys, ["--sparse-decode"], f"{named} --sparse-decode-allow-untested-sglang")
    arguments = prepare("--sparse-decode", "--sparse-decode-allow-untested-sglang")
    assert arguments.decode_attention_backend == "sparse_decode"
    assert json.loads(os.environ[ENVIRONMENT_VARIABLE])["allow_untested_sglang"] is True


# A main module that breaks SGLang and then is `sglang.launch_server`. Spawned processes import it again.
BROKEN = """
import runpy, sys

{damage}

if __name__ == "__main__":
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__")
"""

IN_SCHEDULER = "if __name__ == '__mp_main__':\n    "
DAMAGES = {
    "a hook target is gone": (
        "import sglang.srt.model_executor.model_runner_components.attention_backend_setup as setup\n"
        "del setup._build_full_attention_backend_from_str",
        "_build_full_attention_backend_from_str",
    ),
    "the argument hook cannot be applied": (
        "from sglang.srt.plugins.hook_registry import HookRegistry as Registry\n"
        "apply = Registry._apply_target.__func__\n"
        "def broken(cls, target, hooks):\n"
        "    if target.endswith('from_cli_args'): raise RuntimeError('deliberately broken')\n"
        "    return apply(cls, target, hooks)\n"
        "Registry._apply_target = classmethod(broken)",
        "from_cli_args was not applied",
    ),
    "a hook cannot be applied in the scheduler": (
        "from sglang.srt.plugins.hook_registry import HookRegistry as Registry\n"
        "apply = Registry._apply_target.__func__\n"
        "def broken(cls, target, hooks):\n"
        "    if target.endswith('get_internal_state'): raise RuntimeError('deliberately broken')\n"
        "    return apply(cls, target, hooks)\n"
        "Registry._apply_target = classmethod(broken)",
        "get_internal_state was not applied",
    ),
    "the plugin fails in the scheduler": (
        IN_SCHEDULER + "import sglang_sparse.cpu.paged_allocator as allocator; del allocator.alloc_decode",
        "alloc_decode",
    ),
    "the pool sizing is replaced": (
        IN_SCHEDULER + "import sglang_sparse.memory as memory; memory.reserve = None",
        "TypeError",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_hook_stops_the_server(tmp_path: Path, random_llama: Path, damage: str) -> None:
    code, named = DAMAGES[damage]
    driver = tmp_path / "driver.py"
    driver.write_text(BROKEN.format(damage=code))
    line = harness.command(random_llama, "--sparse-decode")
    line[1:3] = [str(driver)]
    result = subprocess.run(
        line,
        env=harness.environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        start_new_session=True,
    )
    assert result.returncode != 0
    errors = [text for text in (result.stderr + result.stdout).splitlines() if "sglang-sparse: error: " in text]
    assert len(errors) == 1, result.stderr[-3000:]
    assert named in errors[0]
    assert "ready to roll" not in result.stderr + result.stdout


def test_the_exit_code_of_a_refused_server(random_llama: Path) -> None:
    line = harness.command(random_llama, "--sparse-decode", "--sparse-decode-gamma", "2")
    result = subprocess.run(line, env=harness.environment(), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "sglang-sparse: error: --sparse-decode-gamma is 2.0" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_calibrated_config_brings_its_page_size_and_fits_its_model_alone(
    prepare: Any, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    shape = {"architecture": "LlamaForCausalLM", "layers": 2, "kv_heads": 2, "head_dim": 64}
    config = tmp_path / "config.json"
    flags = ["--sparse-decode", "--sparse-decode-config", str(config)]
    config.write_text(json.dumps({"model": shape, "page_size": 32, "gamma_by_layer": [0.9, 0.8]}))
    assert prepare(*flags).page_size == 32
    os.environ[ENVIRONMENT_VARIABLE] = ""
    assert prepare(*flags, "--page-size", "128").page_size == 128
    os.environ[ENVIRONMENT_VARIABLE] = ""
    config.write_text(json.dumps({"model": shape | {"kv_heads": 6}}))
    assert_refused(prepare, capsys, flags, "was made for LlamaForCausalLM of 2 layers, 6 KV heads, head dim 64")


@pytest.mark.parametrize(
    ("by_head", "named"),
    [
        ([[0.9, 0.8]] * 3, "'gamma_by_head' is for 3 layers of 2 KV heads, but the model has 2 layers of 2"),
        ([[0.9]] * 2, "'gamma_by_head' is for 2 layers of 1 KV heads, but the model has 2 layers of 2"),
        ([[0.9, 0.8], [0.9, 1.1]], "'gamma_by_head' has [0.9, 1.1] for layer 1: give a list for each layer"),
    ],
)
def test_gammas_of_other_heads_than_the_models(
    prepare: Any, capsys: pytest.CaptureFixture, tmp_path: Path, by_head: list[list[float]], named: str
) -> None:
    config = tmp_path / "config.json"
    flags = ["--sparse-decode", "--sparse-decode-config", str(config)]
    config.write_text(json.dumps({"gamma_by_head": by_head}))
    assert_refused(prepare, capsys, flags, named)
    # A flag that wins leaves nothing to refuse.
    assert prepare(*flags, "--sparse-decode-gamma", "0.9").page_size == 64
