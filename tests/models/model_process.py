"""Runs tiny models in processes forked from one that has SGLang imported: its model runner, without scheduler and HTTP.

A server takes 20 s to start, a fork one, so that many architectures can be tried. What a model has to do with, its KV
pool, its attention backends and the batches of a forward, is SGLang's; the scheduler, which knows nothing of
architectures, is left to the server tests.

    python model_process.py REQUEST.json ANSWERS.json

The request: `{"prompts": [[token, ...]], "tokens": n, "modes": {mode: {"sparse": options or null, "flags": [...]}},
"models": {name: {"path": folder, "flags": [...], "adapter": name of a LoRA adapter or null}}}`. The answers, of each
model in each mode: `{mode: {name: {"tokens": [[...]], "smallest_gap": x, "sparse": {...}} or {"error": text}}}`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import sys
import tempfile
import traceback
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_sparse import cpu

cpu.activate()

AT_ONCE = 3
"""Modes, which take about equally long: on two cores, three at once end before two and one."""


def load(path: str, flags: list[str]) -> Any:
    """SGLang's model runner of a checkpoint, ready to run; `_TorchBenchRunner` of `sglang.benchmark.one_batch`."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, prepare_server_args, set_global_server_args_for_scheduler

    server_args = prepare_server_args(["--model-path", path, *cpu.SERVER_FLAGS, *flags])
    server_args.check_lora_server_args()
    set_global_server_args_for_scheduler(server_args)
    return one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)[0]


def requests(prompts: list[list[int]], adapter: str | None) -> list[Any]:
    """A SGLang request for each prompt, sampled greedily; `adapter` is the id of a LoRA adapter."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = []
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_new_tokens=1 << 20)
        ids = array("q", prompt)
        req = Req(rid=str(number), origin_input_text="", origin_input_ids=ids, sampling_params=params, lora_id=adapter)
        req.full_untruncated_fill_ids = req.origin_input_ids
        req.logprob_start_len = -1
        req.set_extend_range(0, len(prompt))
        made.append(req)
    return made


def generate(runner: Any, prompts: list[list[int]], tokens: int, adapter: str | None) -> dict[str, Any]:
    """Greedy tokens of all prompts as one batch, and the smallest gap between the two best logits."""
    adapters = {path.lora_name: path.lora_id for path in runner.torch_runner.server_args.lora_paths or []}
    chosen, logits, batch = runner.extend(requests(prompts, adapters[adapter] if adapter else None))
    columns, steps = [chosen], [logits]
    for _ in range(tokens - 1):
        chosen, logits = runner.decode(chosen, batch)
        columns.append(chosen)
        steps.append(logits)
    gaps = [step.float().topk(2).values.diff(dim=1).abs().min().item() for step in steps]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {"tokens": [list(row) for row in rows], "smallest_gap": min(gaps)}


def sparse_report() -> dict[str, Any] | None:
    """What the steps of the model that runs now have read; None for dense decode."""
    import torch

    from sglang_sparse import plugin

    backend = plugin._backend
    if backend is None:
        return None
    step = backend.step
    table, lengths = step.buffers.page_table, step.buffers.seq_lens.tolist()
    page_size = step.geometry.page_size
    closed = torch.cat([row[: length // page_size] for row, length in zip(table, lengths, strict=False)]).unique()
    return {
        "kept_fraction": step.counters.read().kept_fraction,
        "sparse_layers": step.sparse_layers,
        "closed_pages": len(closed),
        "stale_pages": sum(
            step.summaries.stale_pages(layer, *backend.pool_copies(layer), closed.long())
            for layer in step.sparse_layers
        ),
    }


def run(model: dict[str, Any], flags: list[str], prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """One model, in a process that has loaded plugins and no other model."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            runner = load(model["path"], [*flags, *model["flags"]])
        return {**generate(runner, prompts, tokens, model["adapter"]), "sparse": sparse_report()}
    except SystemExit:
        return {"error": said.getvalue()}
    except Exception:
        return {"error": traceback.format_exc()}


def run_mode(mode: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """All models, in a process that has loaded no plugins; each runs in a fork of its own."""
    from sglang.srt.plugins import load_plugins

    if mode["sparse"] is not None:
        from sglang_sparse.options import SparseDecodeOptions

        # As a scheduler process finds them: its hooks are registered when plugins are loaded.
        SparseDecodeOptions(**mode["sparse"]).to_environment()
    load_plugins()
    return {
        name: forked(run, model, mode["flags"], request["prompts"], request["tokens"])
        for name, model in request["models"].items()
    }


def forked(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Calls a function in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.json")
        child = os.fork()
        if child == 0:
            try:
                file.write_text(json.dumps(function(*args)))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return json.loads(file.read_text()) if file.exists() else {"error": "the process ended without an answer"}


def import_everything() -> None:
    """What models and hooks need, so that forks have it."""
    for module in (
        "sglang.benchmark.one_batch",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.models.registry",
        "sglang.srt.lora.lora_manager",
        "sglang_sparse.plugin",
        "sglang_sparse.backend",
    ):
        importlib.import_module(module)
    from sglang_sparse import hook_targets

    for targets in hook_targets.by_group().values():
        for target in targets:
            pkgutil.resolve_name(target)


def pin_nothing() -> None:
    """Lets SGLang's LoRA layers run on a CPU: they pin memory, which torch refuses where no device could read it."""
    import torch

    if torch.cuda.is_available():
        return

    def unpinned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, pin_memory=False, **kwargs: original(*args, **kwargs)

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    import torch

    torch.set_num_threads(1)
    pin_nothing()
    import_everything()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda mode: forked(run_mode, mode, request), request["modes"].values())
        Path(sys.argv[2]).write_text(json.dumps(dict(zip(request["modes"], answers, strict=True))))


if __name__ == "__main__":
    main()
