"""Command line: how good forecasts are for a model. `python -m sglang_sparse.forecast.evaluate --help`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_sparse.calibrate.errors import CalibrationError
from sglang_sparse.files import FileError, check_target, write_bytes
from sglang_sparse.options import OptionsError

from .errors import ForecastError

PROGRAM = "sglang_sparse.forecast.evaluate"
KINDS = ("retrieval", "code", "prose")
SUMMARIES = ("thumbnail", "block-mean", "page-mean", "page-midpoint", "window-mean")
HELP = """Decodes with a model under the server's settings, keeps a cache of blocks for each layer and KV head, and
tells which share of the blocks that a step misses each forecast would have prefetched, at equal bytes. Predictors:
none; the previous step's queries; query; query folded to one vector per KV head; with --heads trained ones; the step's
true queries, the bound of what the summaries allow; an oracle."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=HELP)
    add = made.add_argument
    add("--model", type=Path, required=True, help="folder of a Hugging Face model")
    add("--prompts", type=Path, help='JSONL, one {"text": ...} or {"messages": [...]} a line (default: generated ones)')
    add("--context", type=int, default=4096, help="tokens of a prompt and its continuation (default: %(default)s)")
    add("--num-prompts", type=int, default=3, help="how many prompts to generate (default: %(default)s)")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of generated prompts (default: all, in turn)")
    add("--tokens", type=int, default=48, help="decode steps of a prompt (default: %(default)s)")
    add("--warm-up", type=int, help="first steps that do not count (default: a quarter)")
    add("--gamma", type=float, default=0.975, help="what the steps read (default: %(default)s)")
    add("--cache", type=float, default=2.0, help="slots ÷ mean blocks a step keeps; 0: the last step's (default: 2)")
    add("--budgets", type=float, nargs="+", default=[0.5, 1, 1.5, 2, 3], help="bytes prefetched ÷ bytes missed")
    add("--summaries", choices=SUMMARIES, default="thumbnail", help="what blocks are ranked by (default: %(default)s)")
    add("--heads", type=Path, help="file of trained heads to evaluate too")
    add("--page-size", type=int, default=64, help="(default: %(default)s)")
    add("--block-size", type=int, default=16, help="(default: %(default)s)")
    add("--csv", type=Path, help="CSV file to write: a row for each predictor and layer")
    add("--plot", type=Path, help="PNG file to write")
    add("--device", choices=("cuda", "cpu"), help="(default: cuda if there is one)")
    add("--dtype", default="float32", choices=("float32", "float16", "bfloat16"), help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="of the generated prompts (default: %(default)s)")
    return made


def check(args: argparse.Namespace) -> int:
    """The warm-up in steps. Raises before the model is loaded if a value is wrong or a file cannot be written."""
    for name in ("context", "num_prompts", "tokens"):
        if getattr(args, name) < 1:
            raise ForecastError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give a whole number above 0")
    if not 0 <= args.cache < 1e6:
        raise ForecastError(f"--cache is {args.cache:g}: give 0 or more")
    if not all(0 < budget < 1e6 for budget in args.budgets):
        raise ForecastError("--budgets: give numbers above 0")
    warm_up = args.tokens // 4 if args.warm_up is None else args.warm_up
    if not 0 <= warm_up < args.tokens:
        raise ForecastError(f"--warm-up is {warm_up}: give a number from 0 to below --tokens {args.tokens}")
    for flag, path, suffixes in (("--csv", args.csv, ()), ("--plot", args.plot, (".png",))):
        if path is not None:
            check_target(flag, path, suffixes)
    needed = ["torch", "tqdm", "transformers", *(["matplotlib"] if args.plot else [])]
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise ForecastError(f"{name} is not installed: pip install 'sglang-sparse[eval]'")
    return warm_up


def masses_of(args: argparse.Namespace, bits: int) -> Any:
    from . import ranking

    page, block = args.page_size, args.block_size
    return {
        "thumbnail": lambda: ranking.by_thumbnail(bits, page, block),
        "block-mean": lambda: ranking.by_block_mean(block),
        "page-mean": lambda: ranking.by_page_mean(page, block),
        "window-mean": lambda: ranking.by_window_mean(page, block),
        "page-midpoint": lambda: ranking.by_page_midpoint(page, block),
    }[args.summaries]()


def run(args: argparse.Namespace, warm_up: int) -> int:
    from sglang_sparse.cpu import activate

    activate()
    import torch

    from sglang_sparse.calibrate.model import load_config, load_tokenizer, stop_tokens
    from sglang_sparse.calibrate.prompts import generate_prompts, read_prompts
    from sglang_sparse.calibrate.replay import Replay
    from sglang_sparse.calibrate.settings import Setting
    from sglang_sparse.options import SparseDecodeOptions

    from .choice import make_forecast
    from .evaluation import Tallies, evaluate_steps
    from .evaluation_report import as_csv, draw, markdown
    from .model_parts import parts_of_transformers
    from .projections import folded_forecast, query_forecast
    from .recording import record_steps

    options = SparseDecodeOptions(gamma=args.gamma, block_size=args.block_size)
    setting = Setting(options, page_size=args.page_size)
    limit = load_config(args.model).max_position_embeddings
    if args.context > limit:
        raise ForecastError(f"--context {args.context} exceeds the model's {limit}: lower it")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ForecastError("--device cuda: there is no CUDA device: use --device cpu")
    tokenizer = load_tokenizer(args.model)
    if args.prompts:
        prompts = read_prompts(args.prompts, tokenizer, context=args.context, tokens=args.tokens)
    else:
        prompts = generate_prompts(
            tokenizer, context=args.context, count=args.num_prompts, tokens=args.tokens, seed=args.seed
        )
        prompts = [prompt for prompt in prompts if prompt.kind in args.kinds]
        if not prompts:
            raise ForecastError(
                f"--num-prompts {args.num_prompts} has none of --kinds {' '.join(args.kinds)}: raise it"
            )
    replay = Replay(args.model, device=device, dtype=getattr(torch, args.dtype))
    parts = parts_of_transformers(replay.model, positions=args.context)
    forecasts: dict[str, Any] = {"query": query_forecast(parts)}
    if parts.layers[0].projection.head_norm is None:
        forecasts["query, folded"] = folded_forecast(parts)
    if args.heads:
        forecasts["heads"] = make_forecast(str(args.heads), parts, "--heads")
    stop = stop_tokens(args.model, tokenizer)
    tallies: Tallies = {}
    budgets, masses = tuple(args.budgets), masses_of(args, options.thumbnail_bits)
    used = steps_used = 0
    for prompt in prompts:
        started = time.perf_counter()
        steps = record_steps(replay, parts, prompt, setting, args.tokens, stop)
        # An answer that ends in the warm-up has nothing to say about what comes after it.
        if len(steps.positions) > warm_up:
            used, steps_used = used + 1, steps_used + len(steps.positions) - warm_up
            evaluate_steps(
                steps,
                parts,
                forecasts,
                masses,
                cache=args.cache,
                budgets=budgets,
                warm_up=warm_up,
                tallies=tallies,
                open_page=args.summaries != "window-mean",
            )
        seconds = time.perf_counter() - started
        print(f"{prompt.name}: {len(steps.positions)} steps, {seconds:.0f} s", file=sys.stderr, flush=True)
    if not used:
        raise ForecastError("every answer ended within the warm-up: lower --warm-up, or use other prompts")
    cache = f"{args.cache:g}x the mean set" if args.cache else "what the last step read"
    about = {
        "model": args.model.resolve().name,
        "context": args.context,
        "gamma": args.gamma,
        "cache": args.cache,
        "summaries": args.summaries,
    }
    title = (
        f"{about['model']}, {args.context} tokens, {used} prompts, {steps_used} steps, gamma {args.gamma:g}, cache: "
        f"{cache}, blocks ranked by {args.summaries}"
    )
    print(title)
    print(markdown(tallies, budgets))
    if args.csv:
        write_bytes(args.csv, as_csv(tallies, budgets, about))
    if args.plot:
        write_bytes(args.plot, draw(tallies, budgets, title))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return run(args, check(args))
    except (CalibrationError, FileError, OptionsError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: error: interrupted, nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
