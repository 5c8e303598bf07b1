"""How often a cache of blocks on the GPU would hold what a decode step reads, from real decodes.

    python -m benchmarks offload-trace --model FOLDER --context 30000 --tokens 256 --out trace.json --plot trace.png

Runs a Hugging Face model under each setting, records the blocks that every step keeps in each layer and KV head, and
simulates caches of 1 to 8 times the mean set: least recently used, the clock of `slot_assign` (any slot that this step
has not used, or by age), and a cache that holds the previous step's set alone. Prints hit rates and new blocks a step;
`--out` has them by layer too. Prompts are generated: retrieval, code and prose in turn. Runs on a GPU or a CPU.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common_arguments import make_parser, positive
from benchmarks.errors import BenchmarkError
from benchmarks.machine import gpu_name, require_package, versions
from benchmarks.results import text_table
from sglang_sparse.files import check_target, write_bytes
from sglang_sparse.options import SparseDecodeOptions

SPARDA_BUDGET = 0.047
"""Share of the blocks that SparDA keeps."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("offload-trace", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model")
    parser.add_argument("--context", type=positive, default=8192, help="tokens of a prompt and its continuation")
    parser.add_argument("--num-prompts", type=positive, default=3, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=128, help="decode steps of a prompt (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, help="steps that warm rates leave out (default: a quarter)")
    parser.add_argument("--gammas", type=float, nargs="*", default=[0.95, 0.9], help="beside the default gamma")
    parser.add_argument(
        "--top-k", type=float, nargs="*", default=[SPARDA_BUDGET], help="shares of the blocks to keep, by rule top-k"
    )
    parser.add_argument("--page-size", type=positive, default=64)
    parser.add_argument("--block-size", type=positive, default=16)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="(default: cuda if there is one)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--config",
        type=Path,
        help="JSON file to write for --sparse-decode-config: offload, and each layer's share of slots as the default "
        "setting needs them",
    )
    parser.add_argument("--plot", type=Path, help="PNG file to write: hit rate against cache size")
    return parser.parse_args(arguments)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What is recorded, by name."""
    from sglang_sparse.calibrate.settings import Setting

    block = {"block_size": args.block_size}
    default = SparseDecodeOptions(**block)
    made = {f"gamma {default.gamma:g} (default)": default}
    made |= {f"gamma {gamma:g}": SparseDecodeOptions(gamma=gamma, **block) for gamma in args.gammas}
    made |= {f"top-k {k:g}": SparseDecodeOptions(rule="top-k", top_k=k, **block) for k in args.top_k}
    return {name: Setting(options, page_size=args.page_size) for name, options in made.items()}


def tables(results: dict[str, Any]) -> str:
    """The figures as text: hit rates by size, then layers."""
    sizes = next(iter(results.values()))["sizes"]
    head = ("setting", "kept", "new of kept", "cache", *(f"{size:g}x" for size in sizes))
    lines = []
    for name, found in results.items():
        shown = [(f"{p}, warm", rate["warm"]) for p, rate in found["rates"]["row"].items()]
        shown += [("lru, from empty", found["rates"]["row"]["lru"]["all_steps"])]
        shown += [(f"lru, warm, {s} shares", found["rates"][s]["lru"]["warm"]) for s in ("layer", "equal")]
        shown += [("previous step", [found["previous_step_only"]])]
        for index, (cache, rates) in enumerate(shown):
            first = (name, f"{found['kept']:.1%}", f"{found['new_of_kept']:.1%}") if index == 0 else ("", "", "")
            cells = [f"{rate:.1%}" for rate in rates]
            lines.append((*first, cache, *cells, *[""] * (len(sizes) - len(cells))))
    layers = []
    for name, found in results.items():
        own = found["by_layer"]
        for what, key, form in (
            ("mean set, blocks", "mean_set", "{:.0f}"),
            ("new of kept", "new_of_kept", "{:.0%}"),
            ("lru 2x, warm", "lru_warm_at_2", "{:.0%}"),
        ):
            layers.append((name, what, " ".join(form.format(value) for value in own[key])))
    by_layer = text_table(("setting", "by layer", "from the first layer on"), layers, left=3)
    return f"{text_table(head, lines, left=1)}\n\n{by_layer}"


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise BenchmarkError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(about: dict[str, Any], results: dict[str, Any]) -> bytes:
    """A PNG: a panel for each setting, a line for each policy."""
    plot = pyplot()
    figure, axes = plot.subplots(1, len(results), figsize=(1 + 3.4 * len(results), 3.8), squeeze=False, sharey=True)
    for place, (name, found) in zip(axes[0], results.items(), strict=True):
        for policy, rates in found["rates"]["row"].items():
            place.plot(found["sizes"], rates["warm"], marker="o", ms=3, label=f"{policy}, warm")
        place.plot(
            found["sizes"], found["rates"]["row"]["lru"]["all_steps"], "--", color="0.5", label="lru, from empty"
        )
        place.axhline(found["previous_step_only"], color="0.7", lw=1, label="previous step only")
        place.set(xlabel="slots ÷ mean blocks kept", title=f"{name}, kept {found['kept']:.1%}")
        place.title.set_fontsize(9)
        place.grid(alpha=0.3)
    axes[0][0].set_ylabel("hit rate")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{about['model']}, {about['context']} tokens, {about['prompts']} prompts", fontsize=9)
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    plot.close(figure)
    return content.getvalue()


def check(args: argparse.Namespace) -> int:
    """The warm-up in steps. Raises before anything is measured if a file cannot be written or a value is wrong."""
    files = (("--out", args.out, (".json",)), ("--config", args.config, (".json",)), ("--plot", args.plot, (".png",)))
    for flag, path, suffixes in files:
        if path is not None:
            check_target(flag, path, suffixes)
    if args.plot:
        pyplot()
    warm_up = args.tokens // 4 if args.warm_up is None else args.warm_up
    if not 0 <= warm_up < args.tokens:
        raise BenchmarkError(f"--warm-up is {warm_up}: give a number from 0 to below --tokens {args.tokens}")
    if args.tokens < 2:
        raise BenchmarkError("--tokens is 1: give at least 2, since steps are compared")
    return warm_up


def main(arguments: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    warm_up = check(args)
    settings = settings_of(args)
    for package in ("torch", "transformers"):
        require_package(package)
    from sglang_sparse.cpu import activate

    activate()
    import torch

    from benchmarks.offload.recording import record
    from benchmarks.offload.summary import summarise
    from sglang_sparse.calibrate.errors import CalibrationError
    from sglang_sparse.calibrate.model import load_config, load_tokenizer, stop_tokens
    from sglang_sparse.calibrate.prompts import generate_prompts
    from sglang_sparse.calibrate.replay import Replay

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("--device cuda: there is no CUDA device: use --device cpu")
    try:
        limit = load_config(args.model).max_position_embeddings
        if args.context > limit:
            raise BenchmarkError(f"--context {args.context} exceeds the model's {limit}: lower it")
        tokenizer = load_tokenizer(args.model)
        prompts = generate_prompts(
            tokenizer, context=args.context, count=args.num_prompts, tokens=args.tokens, seed=args.seed
        )
        replay = Replay(args.model, device=device, dtype=getattr(torch, args.dtype))
        stop = stop_tokens(args.model, tokenizer)
        traces: dict[str, list] = {name: [] for name in settings}
        for prompt in prompts:
            started = time.perf_counter()
            made = record(replay, prompt, list(settings.values()), args.tokens, stop)
            steps = len(made[0].kept)
            print(f"{prompt.name}: {steps} steps, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            # An answer that ends in the warm-up has nothing to say about what comes after it.
            if steps > warm_up:
                for name, trace in zip(settings, made, strict=True):
                    traces[name].append(trace)
    except CalibrationError as error:
        raise BenchmarkError(str(error)) from None
    used = len(next(iter(traces.values())))
    if not used:
        raise BenchmarkError("every answer ended within the warm-up: lower --warm-up, or use other prompts")
    about = {
        "model": args.model.resolve().name,
        "context": args.context,
        "prompts": used,
        "tokens": args.tokens,
        "warm_up": warm_up,
        "page_size": args.page_size,
        "block_size": args.block_size,
        "dtype": args.dtype,
        "device": gpu_name() if device == "cuda" else "cpu",
        "versions": versions(),
    }
    results = {name: summarise(found, warm_up, device) for name, found in traces.items()}
    print(f"{about['model']}, {args.context} tokens, {used} prompts of up to {args.tokens} steps, warm after {warm_up}")
    print(tables(results))
    if args.out:
        write_bytes(args.out, (json.dumps({**about, "results": results}, indent=1) + "\n").encode())
    if args.config:
        shares = next(iter(results.values()))["by_layer"]["mean_set"]
        config = {"offload": True, "slot_shares": [round(share, 1) for share in shares]}
        write_bytes(args.config, (json.dumps(config) + "\n").encode())
    if args.plot:
        write_bytes(args.plot, draw(about, results))
    return 0


if __name__ == "__main__":
    from benchmarks.__main__ import main as driver

    sys.exit(driver(["offload-trace", *sys.argv[1:]]))
