"""Command line of the fidelity harness and of calibration; see `--help`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_sparse.calibrate.model import CalibrationError
from sglang_sparse.options import OptionsError

HELP = """Measures what sparse decode reads and how far its next-token distribution is from dense decode's, on a model
and prompts of your own. With --target-kl it finds the setting that reads the fewest bytes within that mean KL and
writes it as a config for --sparse-decode-config. Runs the model with transformers, on the GPU if there is one."""

DTYPE_HELP = """what to compute in (default: float32, so that KL shows what was not read, and no rounding); bytes are
counted for the served KV cache in any case"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m sglang_sparse.calibrate", description=HELP)
    add = made.add_argument
    add("--model", type=Path, required=True, help="folder of a Hugging Face model")
    add("--prompts", type=Path, help='JSONL, one {"text": ...} or {"messages": [...]} a line (default: generated ones)')
    add("--context", type=int, help="tokens of the generated prompts, or the most for --prompts (default: the model's)")
    add("--num-prompts", type=int, default=6, help="how many prompts to generate (default: %(default)s)")
    add("--tokens", type=int, default=64, help="tokens to decode after each prompt (default: %(default)s)")
    add("--gammas", type=float, nargs="+", help="gammas to measure (default: 0.9 0.95 0.98 0.99)")
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
    add("--held-out", type=float, default=0.34, help="share of the prompts that only check (default: %(default)s)")
    add("--out", type=Path, help="JSON file to write: all results, by layer and head too")
    add("--plot", type=Path, help="PNG file to write: bytes read against KL, and kept blocks by layer and head")
    add("--csv", type=Path, help="CSV file to append a row for each setting to")
    add("--device", help="cuda or cpu (default: cuda if there is one)")
    add("--dtype", default="float32", choices=("float32", "float16", "bfloat16"), help=DTYPE_HELP)
    add("--seed", type=int, default=0, help="of the generated prompts (default: %(default)s)")
    return made


def check(args: argparse.Namespace) -> None:
    """Raises CalibrationError if flags do not go together or a value is out of range."""
    from sglang_sparse.calibrate.report import check_writable, plotting

    if (args.target_kl is None) != (args.config is None):
        raise CalibrationError("--target-kl and --config belong together: give both or neither")
    for name, value, low, high in (
        ("--target-kl", args.target_kl, 0, float("inf")),
        ("--held-out", args.held_out, 0, 1),
        *(("--gammas", gamma, 0, 1 + 1e-12) for gamma in args.gammas or ()),
    ):
        if value is not None and not low < value < high:
            raise CalibrationError(f"{name} is {value:g}: give a number above {low:g} and below {high:g}")
    for name in ("context", "num_prompts", "tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise CalibrationError(f"--{name.replace('_', '-')} is {value}: give a whole number above 0")
    if args.grid == "frontier" and (args.page_size, args.block_size, args.target_kl) != (64, 16, None):
        raise CalibrationError("--grid frontier brings its own page and block sizes: use it alone")
    check_writable(args.config, args.out, args.plot, args.csv)
    if args.plot:
        plotting()


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        check(args)
        return run(args)
    except (CalibrationError, OptionsError) as error:
        print(f"sglang_sparse.calibrate: error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    from sglang_sparse.cpu import activate

    activate()
    import torch

    from sglang_sparse.calibrate import grids
    from sglang_sparse.calibrate.model import load_config, load_tokenizer
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
            tokenizer, context=context, count=args.num_prompts, tokens=args.tokens, seed=args.seed
        )
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CalibrationError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from None
    replay = Replay(args.model, device=device, dtype=getattr(torch, args.dtype))
    stop = frozenset({tokenizer.eos_token_id} - {None})
    about = {
        "model": args.model.resolve().name,
        "shape": dataclasses.asdict(replay.shape),
        "context": context,
        "prompts": len(prompts),
        "tokens": args.tokens,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "dtype": str(replay.geometry.dtype).removeprefix("torch."),
    }
    try:
        if args.target_kl is not None:
            return calibrate(args, replay, prompts, base, stop, about)
        gammas = args.gammas or grids.DEFAULT_GAMMAS
        grid = grids.frontier_grid(gammas) if args.grid == "frontier" else grids.server_grid(base, gammas)
        return report(args, replay, prompts, grid, stop, about)
    except torch.OutOfMemoryError:
        raise CalibrationError(
            f"--device {device} has too little memory for {len(prompts)} prompts of {context} tokens: "
            "lower --context, --num-prompts or --tokens"
        ) from None


def report(args: argparse.Namespace, replay: Any, prompts: list, grid: list, stop: frozenset[int], about: dict) -> int:
    """Measures a grid and writes what was asked for."""
    from tqdm import tqdm

    from sglang_sparse.calibrate import report as reports
    from sglang_sparse.calibrate.measure import measure

    with tqdm(total=len(grid) * len(prompts), unit="pass", disable=None) as bar:
        results = measure(replay, prompts, grid, args.tokens, stop, shows(bar))
    print(reports.table(results))
    default = next((r for r in results if is_default(r)), results[0])
    if args.out:
        reports.write_json(args.out, about, results)
    if args.csv:
        reports.append_csv(args.csv, about, results, is_default)
    if args.plot:
        reports.plot(args.plot, about, [reports.entry(made) for made in results], reports.entry(default))
    return 0


def shows(bar: Any) -> Callable[[str], None]:
    """A progress function that moves `bar` on by one."""

    def progress(text: str) -> None:
        bar.set_postfix_str(text)
        bar.update()

    return progress


def is_default(result: Any) -> bool:
    """Whether a result is of the server's default setting."""
    from sglang_sparse.calibrate.settings import Setting
    from sglang_sparse.options import SparseDecodeOptions

    return result.setting == Setting(SparseDecodeOptions())


def calibrate(
    args: argparse.Namespace, replay: Any, prompts: list, base: Any, stop: frozenset[int], about: dict
) -> int:
    """Finds the setting for `--target-kl`, checks it on held-out prompts and writes the config."""
    from tqdm import tqdm

    from sglang_sparse.calibrate import report as reports
    from sglang_sparse.calibrate import search
    from sglang_sparse.calibrate.measure import Result, measure_references, prepare
    from sglang_sparse.calibrate.settings import Setting

    held = max(1, round(args.held_out * len(prompts)))
    if held >= len(prompts):
        raise CalibrationError(
            f"{len(prompts)} prompts cannot be split by --held-out {args.held_out:g}: give more prompts"
        )
    # Spread over the kinds: each k-th prompt only checks.
    checking = {round((i + 0.5) * len(prompts) / held - 0.5) for i in range(held)}
    with tqdm(unit="pass", disable=None) as bar:
        progress = shows(bar)
        references = []
        for prompt in prompts:
            references.append(prepare(replay, prompt, args.tokens, stop))
            progress(f"dense: {prompt.name}")
        held_out = [reference for i, reference in enumerate(references) if i in checking]
        fitted = [reference for i, reference in enumerate(references) if i not in checking]
        tried: list[Result] = []

        def measure(settings: Sequence[Setting]) -> list[Result]:
            results = measure_references(replay, fitted, settings, progress)
            tried.extend(results)
            return results

        best = search.uniform(measure, base, args.target_kl)
        if best is None:
            raise CalibrationError(f"no setting holds --target-kl {args.target_kl:g} on these prompts: raise it")
        best = search.by_layer(measure, best, args.target_kl)
        (confirmed,) = measure_references(replay, held_out, [best.setting], progress)
        while confirmed.kl_mean > args.target_kl:
            higher = search.raised(best.setting)
            if higher is None:
                raise CalibrationError(
                    f"--target-kl {args.target_kl:g} does not hold on the held-out prompts: raise it"
                )
            (best,) = measure([higher])
            (confirmed,) = measure_references(replay, held_out, [higher], progress)
    print(reports.table([best, confirmed]))
    print(f"second line: {held} of {len(prompts)} prompts, held out from the search")
    print(predicted_gain(replay, about["context"], best.bytes_read))
    config = json.dumps(search.to_config(best, replay.shape), indent=1)
    reports.write_whole(args.config, lambda file: file.write_text(config + "\n"))
    if args.out:
        reports.write_json(args.out, {**about, "target_kl": args.target_kl}, [best, confirmed, *tried])
    if args.csv:
        reports.append_csv(args.csv, about, [best], is_default)
    if args.plot:
        # Layers measured alone are steps on the way, not settings to choose from.
        shown = [result for result in tried if not result.setting.options.dense_layers]
        reports.plot(args.plot, about, [reports.entry(made) for made in (*shown, best)], reports.entry(best))
    print(
        f"wrote {args.config}: python -m sglang.launch_server ... --sparse-decode --sparse-decode-config {args.config}"
    )
    return 0


def predicted_gain(replay: Any, context: int, share: float) -> str:
    """What the bytes say of the time per token: weights and KV are all that a decode step has to read."""
    embedding = replay.model.get_input_embeddings().weight
    tied = replay.model.get_output_embeddings().weight is embedding
    weights = sum(p.numel() * p.element_size() for p in replay.model.parameters())
    weights -= 0 if tied else embedding.numel() * embedding.element_size()
    g = replay.geometry
    kv = context * replay.layers * g.kv_heads * g.kv_bytes
    gains = ", ".join(
        f"{(weights + batch * kv) / (weights + batch * kv * share):.2f} at batch {batch}" for batch in (1, 8, 64)
    )
    return f"predicted from bytes (weights and KV) at {context} tokens, dense ÷ sparse time per token: {gains}"


if __name__ == "__main__":
    sys.exit(main())
