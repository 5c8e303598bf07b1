"""Time per output token of real servers at long context, dense and sparse in turn.

    python -m benchmarks.server.tpot --model DIR [--dummy] --context 130000 --batch 1 4 \\
        --variant dense= --variant "sparse=--sparse-decode --sparse-decode-rule top-k --sparse-decode-top-k 0.2"

Prompts are random tokens, one per request; each is prefilled before timing, so that what is timed is decoding alone.
Every variant gets decode CUDA graphs of exactly the batch sizes measured. Prints a row per variant and batch.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from pathlib import Path

from .launch import Server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dummy", action="store_true", help="random weights: the folder needs only a config")
    parser.add_argument("--tokenizer", help="folder of a tokenizer, if the model has none")
    parser.add_argument("--context", type=int, required=True, help="prompt tokens of each request")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated per request")
    parser.add_argument("--prefill-graphs", action="store_true", help="capture SGLang's prefill graphs too")
    parser.add_argument("--variant", action="append", required=True, help="NAME=flags of sglang.launch_server")
    parser.add_argument("--logs", type=Path, default=Path())
    parser.add_argument("--out", type=Path, help="append rows as JSON lines")
    args = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        print("benchmarks.server.tpot: no CUDA device: run it on a GPU host", file=sys.stderr)
        return 2
    generator = random.Random(0)
    prompts = [[generator.randrange(1000, 40000) for _ in range(args.context)] for _ in range(max(args.batch))]
    common = ["--cuda-graph-bs-decode", *map(str, args.batch)]
    if not args.prefill_graphs:
        common += ["--disable-prefill-cuda-graph"]
    if args.dummy:
        common += ["--load-format", "dummy"]
    if args.tokenizer:
        common += ["--tokenizer-path", args.tokenizer]
    for variant in args.variant:
        name, _, flags = variant.partition("=")
        with Server(args.model, [*common, *shlex.split(flags)], args.logs / f"tpot-{name}.log") as server:
            print(f"{name}: ready after {server.start_seconds:.0f} s; prefilling {len(prompts)} prompts", flush=True)
            for prompt in prompts:
                server.token_times(prompt, 1)
            for batch in args.batch:
                ms = server.decode_ms(prompts[:batch], args.tokens)
                info = server.sparse_info() or {}
                row = {
                    "variant": name,
                    "batch": batch,
                    "context": args.context,
                    "tpot_ms": round(ms, 3),
                    "kept": info.get("kept_fraction"),
                    "bytes_read": info.get("bytes_read_fraction"),
                    "flags": flags,
                }
                print(json.dumps(row), flush=True)
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
