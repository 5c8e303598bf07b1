"""Command line: trains forecast heads for a model. `python -m sglang_sparse.forecast.train --help`."""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_sparse.calibrate.errors import CalibrationError
from sglang_sparse.files import FileError, check_target, write_bytes
from sglang_sparse.options import OptionsError

from .errors import ForecastError

PROGRAM = "sglang_sparse.forecast.train"
LINE_EVERY = 10
"""Steps between lines of progress where the standard error is no terminal."""
HELP = """Trains heads that name the blocks the next layer will read, for --sparse-decode-forecast FILE. The model stays
as it is. Interrupted, the same command goes on from the last checkpoint, which is beside the output, to the same
result."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=HELP)
    add = made.add_argument
    add("--model", type=Path, required=True, help="folder of a Hugging Face model")
    add("--data", type=Path, required=True, help='JSONL, one {"text": ...} or {"messages": [...]} a line; any text')
    add("--out", type=Path, required=True, help="file of heads to write (.safetensors)")
    add("--plot", type=Path, help="PNG of loss and recall (default: beside --out)")
    add("--length", type=int, default=16384, help="tokens of a sequence that texts are packed into (default: 16384)")
    add(
        "--start",
        choices=("fit", "query"),
        default="fit",
        help="what training starts from: the least-squares fit to the next layer's queries, or that layer's own query "
        "projection (default: %(default)s)",
    )
    add("--fit-sequences", type=int, default=16, help="sequences that are fitted to (default: %(default)s)")
    add("--steps", type=int, default=500, help="steps of the optimiser; 0: none after the fit (default: %(default)s)")
    add("--batch", type=int, default=4, help="sequences a step, one after another (default: %(default)s)")
    add("--queries", type=int, default=256, help="queries drawn from a sequence (default: %(default)s)")
    add("--vectors", type=int, help="vectors for each KV head; must divide its query heads (default: all of them)")
    add("--learning-rate", type=float, help="(default: 1e-4 from a fit, else 5e-4)")
    add("--weight-decay", type=float, default=0.01, help="(default: %(default)s)")
    add("--clip", type=float, default=0.5, help="largest norm of a layer's gradient (default: %(default)s)")
    add("--top", type=float, default=0.25, help="share of the blocks that count one by one (default: %(default)s)")
    add("--gamma", type=float, default=0.975, help="coverage of the sets that recall is of (default: %(default)s)")
    add("--block-size", type=int, default=16, help="tokens in a block (default: %(default)s)")
    add("--evaluate-every", type=int, default=50, help="steps between recalls (default: %(default)s)")
    add("--save-every", type=int, default=20, help="steps between checkpoints (default: %(default)s)")
    add("--device", choices=("cuda", "cpu"), help="(default: cuda if there is one)")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16"),
        help="of the frozen model (default: its own); heads are trained in float32",
    )
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    return made


def check(args: argparse.Namespace) -> None:
    """Raises before anything is read if a value is wrong or a file cannot be written."""
    from .training_data import MIN_TOKENS

    least = {"length": MIN_TOKENS, "steps": 0 if args.start == "fit" else 1}
    counts = ("length", "fit_sequences", "steps", "batch", "queries", "vectors", "block_size")
    for name in (*counts, "evaluate_every", "save_every"):
        value, low = getattr(args, name), least.get(name, 1)
        if value is not None and value < low:
            raise ForecastError(f"--{name.replace('_', '-')} is {value}: give a whole number of at least {low}")
    for name, high in (("learning_rate", 1e3), ("clip", 1e9), ("top", 1 + 1e-9), ("gamma", 1 + 1e-9)):
        value = getattr(args, name)
        if value is not None and not 0 < value < high:
            raise ForecastError(f"--{name.replace('_', '-')} is {value:g}: give a number above 0 and below {high:g}")
    if not 0 <= args.weight_decay < 1e3:
        raise ForecastError(f"--weight-decay is {args.weight_decay:g}: give 0 or more")
    check_target("--out", args.out, (".safetensors",))
    check_target("--plot", args.plot, (".png",))
    if not args.model.is_dir():
        raise ForecastError(f"--model {args.model}: there is no such folder: give that of a Hugging Face model")
    for name in ("torch", "tqdm", "transformers", "safetensors", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise ForecastError(f"{name} is not installed: pip install 'sglang-sparse[eval]'")


def run(args: argparse.Namespace) -> int:
    from .training_data import fingerprint, pack, read_texts

    texts = read_texts(args.data)
    from sglang_sparse.cpu import activate

    activate()
    import torch
    from tqdm import tqdm

    from sglang_sparse.calibrate.model import load_config, load_tokenizer
    from sglang_sparse.options import SparseDecodeOptions

    from .heads_file import write_heads
    from .trainer import Trainer
    from .training_state import Recipe

    config = load_config(args.model)
    if args.length > config.max_position_embeddings:
        raise ForecastError(f"--length {args.length} exceeds the model's {config.max_position_embeddings}: lower it")
    sequences = pack(texts, load_tokenizer(args.model), length=args.length, path=args.data)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ForecastError("--device cuda: there is no CUDA device: use --device cpu")
    forced = SparseDecodeOptions()
    recipe = Recipe(
        steps=args.steps,
        batch=args.batch,
        queries=args.queries,
        vectors=args.vectors or config.num_attention_heads // config.num_key_value_heads,
        # From `query` SparDA's. A fit is near a minimum already: larger steps lead away from it first.
        learning_rate=args.learning_rate or (1e-4 if args.start == "fit" else 5e-4),
        weight_decay=args.weight_decay,
        # SparDA's.
        betas=(0.9, 0.95),
        clip=args.clip,
        top=args.top,
        gamma=args.gamma,
        block=args.block_size,
        sink=forced.sink_tokens,
        window=forced.window_tokens,
        evaluate_every=args.evaluate_every,
        seed=args.seed,
        data=fingerprint(sequences),
        dtype=args.dtype,
        start=args.start,
        fit_sequences=args.fit_sequences if args.start == "fit" else 0,
    )
    held_out = "the last one is held out" if len(sequences) > 1 else "recall is measured on it too"
    print(f"{len(sequences)} sequences of {sequences.shape[1]} tokens; {held_out}", file=sys.stderr)
    checkpoint = args.out.with_name(args.out.name + ".checkpoint")
    try:
        trainer = Trainer(args.model, sequences, recipe, device=device, checkpoint=checkpoint)
        if trainer.progress.step:
            print(f"going on after step {trainer.progress.step} of {checkpoint}", file=sys.stderr)
        first, started = trainer.progress.step, time.monotonic()
        with tqdm(total=args.steps, initial=trainer.progress.step, unit="step", disable=None) as bar:

            def show(loss: float) -> None:
                found, done = trainer.progress.recalls[-1][1], trainer.progress.step
                bar.set_postfix(loss=f"{loss:.4f}", recall=f"{found:.3f}", refresh=False)
                bar.update()
                # In a log file, which has no bar.
                if bar.disable and done % LINE_EVERY == 0:
                    pace = (time.monotonic() - started) / (done - first)
                    line = f"step {done} of {args.steps}, {pace:.2f} s each: loss {loss:.4f}, recall {found:.3f}"
                    print(line, file=sys.stderr, flush=True)

            trainer.run(save_every=args.save_every, after_step=show)
    except torch.OutOfMemoryError:
        raise ForecastError(
            f"--device {device} has too little memory for sequences of {sequences.shape[1]} tokens: lower --length, "
            "use --dtype bfloat16, or leave out the fit by --start query"
        ) from None
    # A server keeps them in the model's type anyway.
    own = trainer.model.dtype
    heads = {layer: (w.to(own), None if b is None else b.to(own)) for layer, (w, b) in trainer.heads.items()}
    write_heads(args.out, heads, trainer.identity)
    write_bytes(args.plot, draw(trainer.progress, args.model.resolve().name))
    checkpoint.unlink(missing_ok=True)
    losses, recalls = trainer.progress.losses, trainer.progress.recalls
    tail = max(1, len(losses) // 10)
    loss = f"loss {sum(losses[:tail]) / tail:.4f} at first, {sum(losses[-tail:]) / tail:.4f} at last; "
    found = [f"{recalls[0][1]:.1%} before"]
    if args.start == "fit":
        found.append(f"{recalls[1][1]:.1%} fitted")
    if losses:
        found.append(f"{recalls[-1][1]:.1%} after")
    print(f"{loss if losses else ''}recall {', '.join(found)}; {args.out}")
    return 0


def draw(progress: Any, title: str) -> bytes:
    """A PNG: loss by step, and recall by step and layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8))
    left.plot(range(1, len(progress.losses) + 1), progress.losses, lw=1)
    left.set(xlabel="step", ylabel="KL, mean of layers (nats)", yscale="log")
    middle.plot([step for step, _, _ in progress.recalls], [mean for _, mean, _ in progress.recalls], marker=".")
    middle.set(xlabel="step", ylabel="recall of the set, mean of layers")
    for (step, _, layers), label in ((progress.recalls[0], "before"), (progress.recalls[-1], "after")):
        right.plot(list(layers), list(layers.values()), marker=".", label=f"{label} (step {step})")
    right.set(xlabel="layer", ylabel="recall of the set")
    right.legend(fontsize=8)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"forecast heads of {title}", fontsize=9)
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    pyplot.close(figure)
    return content.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.plot = args.plot or args.out.with_suffix(".png")
    try:
        check(args)
        return run(args)
    except (CalibrationError, FileError, OptionsError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted: the same command goes on from the last checkpoint", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
