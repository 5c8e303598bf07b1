"""Time per output token of real servers at long context, dense and sparse in turn on one machine.

    python -m benchmarks tpot --model QWEN --prompts real --context 30000 --batch 1 16 64
    python -m benchmarks tpot --model WORKLOAD --prompts runs --context 130000 --batch 1 2 4 6

Every request has a prompt of its own, prefilled before timing, so that what is timed is decoding alone: the mean time
between tokens while all requests of the batch decode. Beside it stand the times to the first token: of the prompts that
were prefilled for the batch, one at a time, and of the timed requests, whose prompts are in the prefix cache, all at
once. Every server gets decode CUDA graphs of exactly the batch sizes
measured. Answers are greedy; those of the sparse server are compared with the dense one's, and with real prompts, in an
untimed pass, the distributions they were chosen from (`kl`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common_arguments import add_results_arguments, make_parser, not_negative, open_results, positive
from benchmarks.errors import ServerError
from benchmarks.machine import require_cuda, require_package
from benchmarks.results import Results, Row, share, text_table

from .client import Client, Missed
from .divergence import Scored, mean_divergence
from .launch import Server, add_server_arguments, captures, check_places, common_flags, variants
from .prompts import KINDS, kv_bytes_per_token, make_prompts, read_config
from .statistics import agreement, percentile, tpot_together
from .streams import all_at_once, check_cached, score_at_once, warm

LINK = 50e9
"""Bytes a second that `block_gather` brings over PCIe on an H200 (docs/offload.md): the bound of what steps miss."""

HEAD = (
    "variant",
    "batch",
    "context",
    "TTFT s",
    "cached s",
    "TPOT ms",
    "tokens/s",
    "kept",
    "KV bytes",
    "missed MB",
    "hidden",
    "speed",
    "equal tokens",
    "equal answers",
    "KL",
)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("tpot", __doc__)
    add_server_arguments(parser)
    parser.add_argument("--prompts", choices=KINDS, default="runs", help="(default: runs)")
    parser.add_argument("--context", type=positive, nargs="+", required=True, help="prompt tokens of each request")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 4])
    parser.add_argument(
        "--gammas",
        type=float,
        nargs="+",
        default=[],
        help="also measure sparse servers with these coverages, changed while they run",
    )
    parser.add_argument("--tokens", type=positive, default=256, help="tokens generated per request (default: 256)")
    parser.add_argument(
        "--kl-tokens",
        type=not_negative,
        help="tokens per request whose distributions are compared with the first server's; 0 for none "
        "(default: 64 of real prompts, else 0)",
    )
    add_results_arguments(parser)
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Timed:
    """One batch: seconds a token, kept and bytes read (None if dense), the answers, the median seconds to the first
    token of the prompts that were new to the server (None if none was) and of cached ones, scored answers (empty if not
    asked for), and what steps missed (None without offload)."""

    seconds: float
    read: tuple[float, float] | None
    answers: list[list[int]]
    first: float | None
    first_cached: float
    scored: list[Scored]
    missed: Missed | None = None


def measure_server(
    client: Client,
    prompts: dict[int, list[list[int]]],
    batches: Sequence[int],
    tokens: int,
    gammas: Sequence[float] = (),
    kl_tokens: int = 0,
) -> Iterator[tuple[int, int, float | None, Timed]]:
    """Context, batch size, coverage asked for, and what was measured, one after the other; `prompts` by context.

    The coverage is None for that of the server's own options, which comes first. Leaves out, with a line, batches whose
    prompts the KV cache does not hold.
    """
    capacity = client.token_capacity()
    changes: list[float | None] = [None, *(gammas if client.sparse_info() else ())]
    for context, own in prompts.items():
        warmed = 0
        for batch in sorted(batches):
            needed = sum(map(len, own[:batch])) + batch * (tokens + 128)
            if needed > capacity:
                short = f"takes {needed} tokens of KV cache, the server has {capacity}: left out"
                print(f"batch {batch} of {context}: {short}", flush=True)
                continue
            new = [answer.ttft for answer in warm(client, own[warmed:batch])]
            first = percentile(new, 0.5) if new else None
            warmed = batch
            for gamma in changes:
                if len(changes) > 1:
                    client.change(gamma=gamma)
                # Once untimed, so that what a first batch of this size sets up is not timed.
                all_at_once(client, own[:batch], 8)
                before = client.read_totals()
                answers = all_at_once(client, own[:batch], tokens)
                after = client.read_totals()
                for answer, prompt in zip(answers, own, strict=False):
                    check_cached([answer], len(prompt))
                read = after.since(before) if after else None
                scored = score_at_once(client, own[:batch], kl_tokens) if kl_tokens else []
                timed = Timed(
                    tpot_together(answers),
                    read,
                    [answer.tokens for answer in answers],
                    first,
                    percentile([answer.ttft for answer in answers], 0.5),
                    scored,
                    after.missed_since(before) if after else None,
                )
                first = None
                yield context, batch, gamma, timed


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    args = parse(given)
    servers = variants(args)
    check_places(args)
    results = open_results("tpot", given, args)
    require_cuda()
    require_package("sglang")
    prompts = {
        context: make_prompts(args.prompts, max(args.batch), context, model=args.model, tokenizer=args.tokenizer)
        for context in sorted(set(args.context))
    }
    return measure_variants(args, servers, prompts, results)


def measure_variants(
    args: argparse.Namespace, servers: dict[str, list[str]], prompts: dict[int, list[list[int]]], results: Results
) -> int:
    """Starts and measures each server, appends rows, prints a table. Raises ServerError."""
    token_bytes = kv_bytes_per_token(read_config(args.model))
    case = f"{Path(args.model).name}, {args.prompts} prompts, {captures(args)}"
    kl_tokens = (64 if args.prompts == "real" else 0) if args.kl_tokens is None else args.kl_tokens
    baseline: dict[tuple[int, int], Timed] = {}
    lines: list[tuple[str, ...]] = []
    for number, (name, flags) in enumerate(servers.items()):
        found = False
        with Server(args.model, [*common_flags(args, args.batch), *flags], args.logs / f"tpot-{name}.log") as server:
            print(f"{name}: ready after {server.start_seconds:.0f} s: {' '.join(flags)}", flush=True)
            try:
                for context, batch, gamma, timed in measure_server(
                    server, prompts, args.batch, args.tokens, args.gammas, kl_tokens
                ):
                    found = True
                    impl = name if gamma is None else f"{name} gamma {gamma:g}"
                    if number == 0:
                        baseline[context, batch] = timed
                    before = baseline.get((context, batch)) if number else None
                    kept, bytes_share = timed.read or (1.0, 1.0)
                    # The middle of what is decoded: a step reads all tokens so far.
                    read = sum(map(len, prompts[context][:batch])) + batch * args.tokens / 2
                    moved = int(bytes_share * read * token_bytes)
                    kl = mean_divergence(timed.scored, before.scored) if before else None
                    rows = [
                        Row(
                            "tpot",
                            case,
                            batch,
                            context,
                            impl,
                            timed.seconds * 1e3,
                            kept,
                            moved,
                            kl=kl[0] if kl else None,
                        )
                    ]
                    if timed.first:
                        rows.append(Row("ttft", case, 1, context, impl, timed.first * 1e3))
                        rows.append(Row("ttft-cached", case, batch, context, impl, timed.first_cached * 1e3))
                    if timed.missed:
                        missed = timed.missed.waited
                        rows.append(
                            Row("pcie", case, batch, context, impl, missed / LINK * 1e3, bytes_read=int(missed))
                        )
                    results.append(rows)
                    lines.append(table_line(impl, batch, context, timed, before, kl))
                    print("  ".join(lines[-1]), flush=True)
            except ServerError as error:
                raise ServerError(f"{name}: {error}") from None
        if not found:
            print(
                f"benchmarks tpot: {name}: no batch fits into the KV cache: lower --batch or --context", file=sys.stderr
            )
            return 1
    print("\n" + text_table(HEAD, lines))
    return 0


def table_line(
    impl: str, batch: int, context: int, timed: Timed, baseline: Timed | None, kl: tuple[float, int] | None
) -> tuple[str, ...]:
    """A line under `HEAD`; `baseline` is what it is compared with, `kl` the divergence and its positions."""
    kept, bytes_share = timed.read or (1.0, 1.0)
    speed = equal = same = missed = hidden = ""
    if timed.missed:
        waited, brought = timed.missed.waited, timed.missed.hidden
        missed = f"{waited / 1e6:.1f}"
        hidden = share(brought / (waited + brought)) if brought else ""
    if baseline:
        speed = f"{baseline.seconds / timed.seconds:.2f}x"
        equal_tokens, equal_answers, _ = agreement(timed.answers, baseline.answers)
        equal, same = share(equal_tokens), share(equal_answers)
    return (
        impl,
        str(batch),
        str(context),
        f"{timed.first:.3f}" if timed.first else "",
        f"{timed.first_cached:.3f}",
        f"{timed.seconds * 1e3:.3f}",
        f"{batch / timed.seconds:.1f}",
        share(kept),
        share(bytes_share),
        missed,
        hidden,
        speed,
        equal,
        same,
        f"{kl[0]:.5f} ({kl[1]})" if kl else "",
    )


if __name__ == "__main__":
    from benchmarks.__main__ import main as driver

    sys.exit(driver(["tpot", *sys.argv[1:]]))
