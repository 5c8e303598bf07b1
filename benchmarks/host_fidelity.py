"""How far from dense decode the next-token distribution is if keys and values are rounded in host memory.

    python -m benchmarks host-fidelity --model FOLDER --context 4000 --num-prompts 3

Runs a Hugging Face model. Prompts are prefilled and decoded as they are; then the same tokens are decoded with all full
pages of the prompt rounded, to bfloat16 or as `--sparse-decode-host-dtype fp8_e4m3` does, reading everything and with
sparse decode's defaults. Prints the KL to dense decode on what was not rounded. Here the prompt attends to itself as it
is and summaries are of rounded keys; a server's prompt reads rounded prefixes, and its summaries are of keys before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common_arguments import make_parser, positive
from benchmarks.errors import BenchmarkError
from benchmarks.machine import require_package
from benchmarks.results import text_table
from sglang_sparse.options import FLOAT8_HOST, SparseDecodeOptions

PAGE_SIZE = 64


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("host-fidelity", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model")
    parser.add_argument("--context", type=positive, default=4000, help="tokens of a prompt and its continuation")
    parser.add_argument("--num-prompts", type=positive, default=3, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=64, help="decode steps of a prompt (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="(default: cuda if there is one)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def roundings() -> dict[str, Callable[[Any], Any]]:
    """What becomes of keys or values `[tokens, Hkv, D]` in host memory, by name."""
    import torch
    from sparse_kernels import pack_blocks, unpack_blocks

    def float8(pool: torch.Tensor) -> torch.Tensor:
        # A token's scale is its own: all tokens of a head may as well be one block.
        blocks = torch.stack((pool, pool)).permute(2, 0, 1, 3)
        return unpack_blocks(pack_blocks(blocks), len(pool), pool.dtype)[:, 0].transpose(0, 1)

    return {
        "as it is": lambda pool: pool,
        "bfloat16": lambda pool: pool.to(torch.bfloat16).to(pool.dtype),
        FLOAT8_HOST: float8,
    }


def rounded(prefix: Any, rounding: Callable[[Any], Any], first: int) -> Any:
    """A copy of a `Prefix` with its full pages rounded."""
    import copy

    made = copy.copy(prefix)
    made.k, made.v = prefix.k.clone(), prefix.v.clone()
    full = slice(first, first + prefix.length // PAGE_SIZE * PAGE_SIZE)
    for layer in range(len(made.k)):
        for pool in (made.k[layer], made.v[layer]):
            pool[full] = rounding(pool[full])
    return made


def main(arguments: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    for package in ("torch", "transformers"):
        require_package(package)
    from sglang_sparse.cpu import activate

    activate()
    import torch

    from sglang_sparse.calibrate.errors import CalibrationError
    from sglang_sparse.calibrate.measure import Tally, prepare
    from sglang_sparse.calibrate.model import load_config, load_tokenizer, stop_tokens
    from sglang_sparse.calibrate.prompts import generate_prompts
    from sglang_sparse.calibrate.replay import FIRST_SLOT, Replay
    from sglang_sparse.calibrate.settings import DENSE, Setting

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = {"dense": DENSE, "sparse": Setting(SparseDecodeOptions(), page_size=PAGE_SIZE)}
    tallies = {(name, host): Tally(setting) for name, setting in settings.items() for host in roundings()}
    try:
        limit = load_config(args.model).max_position_embeddings
        if args.context > limit:
            raise BenchmarkError(f"--context {args.context} exceeds the model's {limit}: lower it")
        tokenizer = load_tokenizer(args.model)
        prompts = generate_prompts(
            tokenizer, context=args.context, count=args.num_prompts, tokens=args.tokens, seed=args.seed
        )
        replay = Replay(args.model, device=device, dtype=getattr(torch, args.dtype))
        for prompt in prompts:
            reference = prepare(replay, prompt, args.tokens, stop_tokens(args.model, tokenizer))
            for host, rounding in roundings().items():
                prefix = rounded(reference.prefix, rounding, FIRST_SLOT)
                for name, setting in settings.items():
                    made = replay.force(prefix, reference.tokens, setting, measure=False)
                    tallies[name, host].add(reference, made)
            print(f"{prompt.name}: {len(reference.tokens)} steps", file=sys.stderr, flush=True)
    except CalibrationError as error:
        raise BenchmarkError(str(error)) from None
    rows = []
    for (name, host), tally in tallies.items():
        found = tally.result()
        kl = (f"{value:.2e}" for value in (found.kl_mean, found.kl_p99, found.kl_max))
        rows.append((name, host, *kl, f"{found.agreement:.1%}", f"{found.kept:.1%}"))
    print(f"{args.model.resolve().name}, {args.context} tokens, {args.num_prompts} prompts, {args.dtype}, {device}")
    head = ("reads", "host memory", "KL mean", "p99", "max", "same most likely token", "blocks kept")
    print(text_table(head, rows, left=2))
    return 0


if __name__ == "__main__":
    from benchmarks.__main__ import main as driver

    sys.exit(driver(["host-fidelity", *sys.argv[1:]]))
