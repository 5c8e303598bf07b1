"""Time per output token of real servers at long context, dense and sparse in turn on one machine.

    python -m benchmarks tpot --model QWEN --prompts real --context 30000 --batch 1 16 64
    python -m benchmarks tpot --model WORKLOAD --prompts runs --context 130000 --batch 1 2 4 6

Every request has a prompt of its own, prefilled before timing, so that what is timed is decoding alone: the mean time
between tokens while all requests of the batch decode. Every server gets decode CUDA graphs of exactly the batch sizes
measured. Answers are greedy; those of the sparse server are compared with the dense one's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.common_arguments import add_results_arguments, make_parser, open_results, positive
from benchmarks.errors import ServerError
from benchmarks.machine import require_cuda, require_package
from benchmarks.results import Results, Row, share, text_table

from .client import Client
from .launch import Server, add_server_arguments, captures, check_places, common_flags, variants
from .prompts import KINDS, kv_bytes_per_token, make_prompts, read_config
from .statistics import agreement, tpot_together
from .streams import all_at_once, check_cached, warm

HEAD = (
    "variant",
    "batch",
    "context",
    "TPOT ms",
    "tokens/s",
    "kept",
    "KV bytes",
    "speed",
    "equal tokens",
    "equal answers",
)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("tpot", __doc__)
    add_server_arguments(parser)
    parser.add_argument("--prompts", choices=KINDS, default="runs", help="(default: runs)")
    parser.add_argument("--context", type=positive, required=True, help="prompt tokens of each request")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=positive, default=256, help="tokens generated per request (default: 256)")
    add_results_arguments(parser)
    return parser.parse_args(arguments)


def measure_server(
    client: Client, prompts: list[list[int]], batches: list[int], tokens: int
) -> dict[int, tuple[float, tuple[float, float] | None, list[list[int]]]]:
    """By batch size: seconds a token, kept and bytes read (None if dense), and the answers. Leaves out, with a line,
    batches whose prompts the KV cache does not hold."""
    measured = {}
    capacity = client.token_capacity()
    batches = sorted(batches)
    warmed = 0
    for batch in batches:
        needed = sum(map(len, prompts[:batch])) + batch * (tokens + 128)
        if needed > capacity:
            print(f"batch {batch}: takes {needed} tokens of KV cache, the server has {capacity}: left out", flush=True)
            continue
        warm(client, prompts[warmed:batch])
        warmed = batch
        # Once untimed, so that what a first batch of this size sets up is not timed.
        all_at_once(client, prompts[:batch], 8)
        before = client.read_totals()
        answers = all_at_once(client, prompts[:batch], tokens)
        after = client.read_totals()
        for answer, prompt in zip(answers, prompts, strict=False):
            check_cached([answer], len(prompt))
        read = after.since(before) if after else None
        measured[batch] = (tpot_together(answers), read, [answer.tokens for answer in answers])
    return measured


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    args = parse(given)
    servers = variants(args)
    check_places(args)
    results = open_results("tpot", given, args)
    require_cuda()
    require_package("sglang")
    prompts = make_prompts(args.prompts, max(args.batch), args.context, model=args.model, tokenizer=args.tokenizer)
    return measure_variants(args, servers, prompts, results)


def measure_variants(
    args: argparse.Namespace, servers: dict[str, list[str]], prompts: list[list[int]], results: Results
) -> int:
    """Starts and measures each server, appends rows, prints a table. Raises ServerError."""
    token_bytes = kv_bytes_per_token(read_config(args.model))
    case = f"{Path(args.model).name}, {args.prompts} prompts, {captures(args)}"
    baseline: dict[int, tuple[float, list[list[int]]]] = {}
    lines: list[tuple[str, ...]] = []
    for number, (name, flags) in enumerate(servers.items()):
        with Server(args.model, [*common_flags(args, args.batch), *flags], args.logs / f"tpot-{name}.log") as server:
            print(f"{name}: ready after {server.start_seconds:.0f} s: {' '.join(flags)}", flush=True)
            try:
                measured = measure_server(server, prompts, args.batch, args.tokens)
            except ServerError as error:
                raise ServerError(f"{name}: {error}") from None
        if not measured:
            print(
                f"benchmarks tpot: {name}: no batch fits into the KV cache: lower --batch or --context", file=sys.stderr
            )
            return 1
        for batch, (seconds, read, answers) in measured.items():
            kept, bytes_share = read or (1.0, 1.0)
            # The middle of what is decoded: a step reads all tokens so far.
            tokens = sum(map(len, prompts[:batch])) + batch * args.tokens / 2
            row = Row(
                "tpot",
                case,
                batch,
                args.context,
                name,
                seconds * 1e3,
                kept,
                int(bytes_share * tokens * token_bytes),
            )
            results.append([row])
            speed = equal = same = ""
            if number == 0:
                baseline[batch] = (seconds, answers)
            elif batch in baseline:
                speed = f"{baseline[batch][0] / seconds:.2f}x"
                equal_tokens, equal_answers, _ = agreement(answers, baseline[batch][1])
                equal, same = share(equal_tokens), share(equal_answers)
            lines.append(
                (
                    name,
                    str(batch),
                    str(args.context),
                    f"{seconds * 1e3:.3f}",
                    f"{batch / seconds:.1f}",
                    share(kept),
                    share(bytes_share),
                    speed,
                    equal,
                    same,
                )
            )
            print("  ".join(lines[-1]), flush=True)
    print("\n" + text_table(HEAD, lines))
    return 0


if __name__ == "__main__":
    from benchmarks.__main__ import main as driver

    sys.exit(driver(["tpot", *sys.argv[1:]]))
