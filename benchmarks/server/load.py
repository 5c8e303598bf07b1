"""Throughput and time per token of real servers under load: a closed loop at rising concurrency.

    python -m benchmarks load --model WORKLOAD --context 128000 --concurrency 1 2 4 6

Every prefix is prefilled once before timing and stays in the prefix cache; each request is a prefix and a short end of
its own, so that what is timed is decoding and a prefill of the end. As soon as one request ends, the next starts.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from benchmarks.common_arguments import add_results_arguments, make_parser, open_results, positive
from benchmarks.errors import ServerError
from benchmarks.machine import require_cuda, require_package
from benchmarks.results import Results, Row, share, text_table

from .client import Answer, Client
from .launch import Server, add_server_arguments, captures, check_places, common_flags, variants
from .prompts import KINDS, kv_bytes_per_token, make_prompts, read_config
from .statistics import percentile, throughput
from .streams import check_cached, closed_loop, warm

END_TOKENS = 32
"""Tokens of a request after its prefix."""

HEAD = ("variant", "at once", "context", "tokens/s", "TPOT ms median", "p99", "kept", "KV bytes", "throughput")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("load", __doc__)
    add_server_arguments(parser)
    parser.add_argument("--prompts", choices=KINDS, default="runs", help="(default: runs)")
    parser.add_argument("--context", type=positive, nargs="+", default=[32_000, 128_000], help="tokens of a prefix")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 2, 4, 6], help="requests at once")
    parser.add_argument("--rounds", type=positive, default=2, help="requests for each that runs at once (default: 2)")
    parser.add_argument("--tokens", type=positive, default=1024, help="tokens generated per request (default: 1024)")
    add_results_arguments(parser)
    return parser.parse_args(arguments)


def ends(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """`count` random ends of requests, the same for every server."""
    rng = random.Random(seed)
    low = min(1000, vocabulary // 2)
    return [[rng.randrange(low, vocabulary) for _ in range(END_TOKENS)] for _ in range(count)]


def measure_load(
    client: Client, prefixes: list[list[int]], vocabulary: int, *, concurrency: int, rounds: int, tokens: int
) -> tuple[list[Answer], tuple[float, float] | None]:
    """Answers of a closed loop over warm prefixes, and what its steps kept and read (None if dense)."""
    own = ends(concurrency * rounds, vocabulary, concurrency)
    before = client.read_totals()
    answers = closed_loop(
        client,
        lambda number: prefixes[number % concurrency] + own[number],
        concurrency=concurrency,
        requests=concurrency * rounds,
        tokens=tokens,
    )
    check_cached(answers, min(map(len, prefixes[:concurrency])))
    after = client.read_totals()
    return answers, after.since(before) if after else None


def load_rows(
    case: str, answers: list[Answer], read: tuple[float, float] | None, row: Row
) -> tuple[list[Row], float, float, float]:
    """Three rows like `row`: median and p99 of the requests' times per token, and the server's time per token of any
    request, which is one over its throughput; and the three numbers, in seconds, seconds, and tokens a second."""
    times = [answer.tpot for answer in answers]
    median, p99, rate = percentile(times, 0.5), percentile(times, 0.99), throughput(answers)
    kept = read[0] if read else 1.0
    named = (("TPOT median", median), ("TPOT p99", p99), ("time per token of any request", 1 / rate))
    rows = [
        Row(row.bench, f"{case}, {what}", row.batch, row.context, row.impl, seconds * 1e3, kept, row.bytes_read)
        for what, seconds in named
    ]
    return rows, median, p99, rate


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    args = parse(given)
    servers = variants(args)
    check_places(args)
    results = open_results("load", given, args)
    require_cuda()
    require_package("sglang")
    return measure_variants(args, servers, results)


def measure_variants(args: argparse.Namespace, servers: dict[str, list[str]], results: Results) -> int:
    """Starts and measures each server, appends rows, prints a table. Raises ServerError."""
    config = read_config(args.model)
    token_bytes, vocabulary = kv_bytes_per_token(config), config["vocab_size"]
    model = Path(args.model).name
    most = max(args.concurrency)
    prefixes = {
        context: make_prompts(args.prompts, most, context, model=args.model, tokenizer=args.tokenizer)
        for context in args.context
    }
    baseline: dict[tuple[int, int], float] = {}
    lines: list[tuple[str, ...]] = []
    for number, (name, flags) in enumerate(servers.items()):
        every = [*common_flags(args, args.concurrency), *flags]
        with Server(args.model, every, args.logs / f"load-{name}.log") as server:
            print(f"{name}: ready after {server.start_seconds:.0f} s: {' '.join(flags)}", flush=True)
            capacity = server.token_capacity()
            for context in args.context:
                for concurrency in sorted(args.concurrency):
                    # Ended answers stay in the cache until room is needed; prefixes are the ones used last.
                    needed = concurrency * (context + END_TOKENS + args.tokens + 128)
                    if needed > capacity:
                        print(f"{concurrency} at once: {needed} tokens of KV cache, there are {capacity}: left out")
                        continue
                    try:
                        warm(server, prefixes[context][:concurrency])
                        answers, read = measure_load(
                            server,
                            prefixes[context],
                            vocabulary,
                            concurrency=concurrency,
                            rounds=args.rounds,
                            tokens=args.tokens,
                        )
                    except ServerError as error:
                        raise ServerError(f"{name}, {concurrency} at once: {error}") from None
                    tokens = concurrency * (context + END_TOKENS + args.tokens / 2)
                    moved = int((read[1] if read else 1.0) * tokens * token_bytes)
                    like = Row("load", "", concurrency, context, name, 1.0, None, moved)
                    case = f"{model}, {args.prompts} prompts, {args.tokens} tokens, {captures(args)}"
                    rows, median, p99, rate = load_rows(case, answers, read, like)
                    results.append(rows)
                    if number == 0:
                        baseline[context, concurrency] = rate
                    before = baseline.get((context, concurrency)) if number else None
                    lines.append(
                        (
                            name,
                            str(concurrency),
                            str(context),
                            f"{rate:.1f}",
                            f"{median * 1e3:.3f}",
                            f"{p99 * 1e3:.3f}",
                            share(read[0] if read else 1.0),
                            share(read[1] if read else 1.0),
                            f"{rate / before:.2f}x" if before else "",
                        )
                    )
                    print("  ".join(lines[-1]), flush=True)
    if not lines:
        raise ServerError("nothing fits into the KV cache: lower --concurrency or --context")
    print("\n" + text_table(HEAD, lines))
    return 0


if __name__ == "__main__":
    from benchmarks.__main__ import main as driver

    sys.exit(driver(["load", *sys.argv[1:]]))
