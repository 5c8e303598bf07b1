"""Command line of the fidelity harness and of calibration; see `--help`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_sparse.calibrate.errors import CalibrationError
from sglang_sparse.files import FileError, check_target
from sglang_sparse.options import OptionsError

HELP = """Measures what sparse decode reads and how far its next-token distribution is from dense decode's, on a model
and prompts of your own. With --target-kl it finds the setting that reads the fewest bytes within that mean KL and
writes it as a config for --sparse-decode-config. Runs the model with transformers, on the GPU if there is one."""

GAMMA_PER_HELP = """with --target-kl: what gets a gamma of its own (default: layer). head measures each KV head alone,
which takes 5 passes on each of 3 prompts for each layer and KV head"""

DTYPE_HELP = """what to compute in (default: float32, so that KL shows what was not read, and no rounding); bytes are
counted for the served KV cache in any case"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m sglang_sparse.calibrate", description=HELP)
    add = made.add_argument
    add("--model", type=Path, required=True, help="folder of a Hugging Face model")
    add("--prompts", type=Path, help='JSONL, one {"text": ...} or {"messages": [...]} a line (default: generated ones)')
    add("--context", type=int, help="tokens of the generated prompts, or the most for --prompts (default: the model's)")
    add("--num-prompts", type=int, help="how many prompts to generate (default: 6)")
    add("--tokens", type=int, default=64, help="tokens to decode after each prompt (default: %(default)s)")
    add("--gammas", type=float, nargs="+", help="gammas to measure (default: 0.9 0.95 0.98 0.99)")
    add("--deltas", type=float, nargs="+", help="rule top-delta at these deltas (nats), instead of --gammas' grid")
    add(
        "--grid",
        choices=("server", "frontier"),
        default="server",
        help="the server's estimators, or all that were tried",
    )
    add("--page-size", type=int, default=64, help="tokens in a page of the KV cache (default: %(default)s)")
    add("--block-size", type=int, default=16, help="tokens in a block (default: %(default)s)")
    add("--target-kl", type=float, help="mean KL in nats to hold with the fewest bytes; writes --config")
    add("--config", type=Path, help="file to write for --sparse-decode-config (with --target-kl)")
    add("--gamma-per", choices=("model", "layer", "head"), help=GAMMA_PER_HELP)
    add("--held-out", type=float, help="share of the prompts that only check (default: 0.34)")
    add("--out", type=Path, help="JSON file to write: all results, by layer and head too")
    add("--plot", type=Path, help="PNG file to write: bytes read against KL, and kept blocks by layer and head")
    add("--csv", type=Path, help="CSV file to append a row for each setting to")
    add("--device", choices=("cuda", "cpu"), help="(default: cuda if there is one)")
    add("--dtype", default="float32", choices=("float32", "float16", "bfloat16"), help=DTYPE_HELP)
    add("--seed", type=int, help="of the generated prompts (default: 0)")
    return made


def check(args: argparse.Namespace) -> None:
    """Raises CalibrationError or FileError if flags do not go together or a value is out of range."""
    if (args.target_kl is None) != (args.config is None):
        raise CalibrationError("--target-kl and --config belong together: give both or neither")
    calibrates = args.target_kl is not None
    for name, given, useful, when in (
        ("--gammas", args.gammas, not calibrates, "with --target-kl, which searches them"),
        ("--grid", args.grid != "server", not calibrates, "with --target-kl, which searches"),
        ("--deltas", args.deltas, not calibrates, "with --target-kl, which searches gammas"),
        ("--deltas", args.deltas, args.grid == "server", "with --grid frontier"),
        ("--deltas", args.deltas, not args.gammas, "with --gammas"),
        ("--held-out", args.held_out, calibrates, "without --target-kl"),
        ("--gamma-per", args.gamma_per, calibrates, "without --target-kl"),
        ("--num-prompts", args.num_prompts, args.prompts is None, "with --prompts"),
        ("--seed", args.seed, args.prompts is None, "with --prompts"),
    ):
        if given and not useful:
            raise CalibrationError(f"{name} has no effect {when}: remove one of them")
    for name, value, low, high in (
        ("--target-kl", args.target_kl, 0, float("inf")),
        ("--held-out", args.held_out, 0, 1),
        *(("--gammas", gamma, 0, 1 + 1e-12) for gamma in args.gammas or ()),
        *(("--deltas", delta, 0, float("inf")) for delta in args.deltas or ()),
    ):
        if value is not None and not low < value < high:
            raise CalibrationError(f"{name} is {value:g}: give a number above {low:g} and below {high:g}")
    for name in ("context", "num_prompts", "tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise CalibrationError(f"--{name.replace('_', '-')} is {value}: give a whole number above 0")
    if args.grid == "frontier" and (args.page_size, args.block_size) != (64, 16):
        raise CalibrationError("--grid frontier brings its own page and block sizes: use it alone")
    check_files(args)


def check_files(args: argparse.Namespace) -> None:
    """Raises before hours of measuring, not after, if a file cannot be written."""
    from sglang_sparse.calibrate.report import plotting, read_csv

    files = {"--config": args.config, "--out": args.out, "--plot": args.plot, "--csv": args.csv}
    given = {flag: path for flag, path in files.items() if path is not None}
    for flag, path in given.items():
        check_target(flag, path, (".png",) if flag == "--plot" else ())
        same = [other for other, its in given.items() if other != flag and its.resolve() == path.resolve()]
        if same:
            raise CalibrationError(f"{flag} and {same[0]} both name {path}: give two files")
    if args.csv:
        read_csv(args.csv)
    if args.plot:
        plotting()


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        for name in ("torch", "tqdm", "transformers"):
            if importlib.util.find_spec(name) is None:
                raise CalibrationError(f"{name} is not installed: pip install 'sglang-sparse[eval]'")
        check(args)
        return run(args)
    except (CalibrationError, FileError, OptionsError) as error:
        print(f"sglang_sparse.calibrate: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sglang_sparse.calibrate: error: interrupted, nothing was written", file=sys.stderr)
        return 130


def run(args: argparse.Namespace) -> int:
    from sglang_sparse.cpu import activate

    activate()
    import torch

    from sglang_sparse.calibrate.model import load_config, load_tokenizer, stop_tokens
    from sglang_sparse.calibrate.prompts import generate_prompts, read_prompts
    from sglang_sparse.calibrate.replay import Replay
    from sglang_sparse.calibrate.settings import Setting
    from sglang_sparse.options import SparseDecodeOptions

    base = Setting(SparseDecodeOptions(block_size=args.block_size), page_size=args.page_size)
    limit = load_config(args.model).max_position_embeddings
    context = args.context or limit
    if context > limit:
        raise CalibrationError(f"--context {context} exceeds the model's {limit}: lower it")
    tokenizer = load_tokenizer(args.model)
    if args.prompts:
        prompts = read_prompts(args.prompts, tokenizer, context=context, tokens=args.tokens)
    else:
        prompts = generate_prompts(
            tokenizer, context=context, count=args.num_prompts or 6, tokens=args.tokens, seed=args.seed or 0
        )
    lengths = [len(prompt.tokens) + args.tokens for prompt in prompts]
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CalibrationError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from None
    try:
        replay = Replay(args.model, device=device, dtype=getattr(torch, args.dtype))
        about = {
            "model": args.model.resolve().name,
            "shape": dataclasses.asdict(replay.shape),
            "context": max(lengths),
            "mean_context": sum(lengths) // len(lengths),
            "prompts": len(prompts),
            "tokens": args.tokens,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "dtype": args.dtype,
            "python": platform.python_version(),
        }
        stop = stop_tokens(args.model, tokenizer)
        if args.target_kl is not None:
            from sglang_sparse.calibrate.calibration import calibrate

            return calibrate(args, replay, prompts, base, stop, about)
        return report(args, replay, prompts, base, stop, about)
    except torch.OutOfMemoryError:
        raise CalibrationError(
            f"--device {device} has too little memory for {len(prompts)} prompts of {max(lengths)} tokens in "
            f"{args.dtype}: lower --context, --num-prompts or --tokens, or use --dtype bfloat16"
        ) from None


def report(args: argparse.Namespace, replay: Any, prompts: list, base: Any, stop: frozenset[int], about: dict) -> int:
    """Measures a grid and writes what was asked for."""
    from tqdm import tqdm

    from sglang_sparse.calibrate import grids
    from sglang_sparse.calibrate import report as reports
    from sglang_sparse.calibrate.measure import measure, moves

    gammas = args.gammas or grids.DEFAULT_GAMMAS
    if args.deltas:
        grid = grids.delta_grid(base, args.deltas)
    else:
        grid = grids.frontier_grid(gammas) if args.grid == "frontier" else grids.server_grid(base, gammas)
    with tqdm(total=len(grid) * len(prompts), unit="pass", disable=None) as bar:
        results = measure(replay, prompts, grid, args.tokens, stop, moves(bar))
    print(reports.table(results))
    entries = [reports.entry(result) for result in results]
    if args.out:
        reports.write_json(args.out, about, entries)
    if args.csv:
        reports.append_csv(args.csv, about, results)
    if args.plot:
        defaults = [e for e, result in zip(entries, results, strict=True) if reports.is_default(result)]
        reports.plot(args.plot, about, entries, (defaults or entries)[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
