"""Writes the model of workload (b), about 16 GB: Llama-3.1-8B's shape, random weights, peaked attention.

    python -m benchmarks workload --out DIR
    python -m benchmarks workload --preview 30000 130000

Dummy weights attend almost evenly, so that coverage would keep nearly everything. Here attention is as peaked as the
flag --sharpness says, and prompts of runs of equal tokens make it a matter of pages. docs/benchmarks.md has the
details and the shares kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.common_arguments import make_parser, positive


def main(arguments: list[str] | None = None) -> int:
    import torch

    from benchmarks.workload.model import SHARPNESS, Shape, check_sharpness, write_model

    parser = make_parser("workload", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="folder of the model, made if need be")
    what.add_argument(
        "--preview",
        type=positive,
        nargs="+",
        metavar="CONTEXT",
        help="write nothing; print what the default settings keep of such contexts in a first layer",
    )
    parser.add_argument("--sharpness", type=float, default=SHARPNESS, help="spread of attention logits (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="that draws the weights (default: cuda if there)")
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="(%(default)s)")
    args = parser.parse_args(arguments)
    shape = Shape(**{name: getattr(args, name) for name in vars(Shape())})
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.preview:
        from benchmarks.workload.preview import first_layer_kept
        from sglang_sparse import cpu

        # transformers does not import beside a CPU build of torch otherwise.
        cpu.activate()
        shape.check()
        check_sharpness(args.sharpness)
        for context in args.preview:
            kept, read = first_layer_kept(
                shape, sharpness=args.sharpness, context=context, seed=args.seed, device=device
            )
            low, high = kept.flatten().quantile(torch.tensor([0.05, 0.95])).tolist()
            print(
                f"context {context}: kept {kept.mean():.1%}, rows from {low:.1%} to {high:.1%} (5th and 95th of 100), "
                f"KV bytes read {read:.1%}",
                flush=True,
            )
        return 0
    write_model(
        args.out,
        shape,
        sharpness=args.sharpness,
        seed=args.seed,
        device=device,
        dtype=getattr(torch, args.dtype),
        progress=lambda text: print(f"\r{text}", end="", flush=True),
    )
    print(f"\n{args.out}: {shape.parameters / 1e9:.2f} billion parameters, sharpness {args.sharpness:g}, from {device}")
    return 0


if __name__ == "__main__":
    from benchmarks.__main__ import main as driver

    sys.exit(driver(["workload", *sys.argv[1:]]))
