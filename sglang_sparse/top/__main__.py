"""Command line of the live view; `--help` explains it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from sglang_sparse.evaluate.command_line import Parser
from sglang_sparse.top.server import Server, TopError, Totals
from sglang_sparse.top.summary import summarise

KEY_VARIABLE = "SGLANG_API_KEY"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m sglang_sparse.top",
        description="Shows what a running server with --sparse-decode reads: throughput, kept blocks of each layer, "
        "coverage. Ctrl-C ends it.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server's address (default: %(default)s)")
    parser.add_argument("--api-key", help=f"the server's --api-key, if it has one (default: ${KEY_VARIABLE})")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="time between readings (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="read twice, one interval apart, print once and end")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts; with --once only")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 1 with one line on stderr if the server cannot be shown."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.json and not options.once:
        parser.error("--json prints once: add --once")
    if not 0.1 <= options.interval <= 3600:
        parser.error(f"--interval is {options.interval:g}: give 0.1 to 3600 seconds")
    try:
        server = Server(options.url, options.api_key or os.environ.get(KEY_VARIABLE))
        if options.once:
            _once(server, options.interval, options.json)
        else:
            _live(server, options.interval)
    except TopError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _once(server: Server, interval: float, as_json: bool) -> None:
    if not as_json:
        _check_rich()
    before = server.read()
    time.sleep(interval)
    summary = summarise(server.read(), before)
    if as_json:
        print(json.dumps({"url": server.url, **summary}, allow_nan=False))
        return
    from rich.console import Console

    from sglang_sparse.top.view import screen

    Console().print(screen(server.url, summary))


def _live(server: Server, interval: float) -> None:
    _check_rich()
    from rich.console import Console
    from rich.live import Live

    from sglang_sparse.top.view import screen

    console = Console()
    if not console.is_terminal:
        raise TopError("the live view needs a terminal: use --once, with --json for scripts")
    now, before = server.read(), None
    with Live(screen(server.url, summarise(now, None)), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            before, now = now, _read_again(server)
            live.update(screen(server.url, summarise(now, before)), refresh=True)


def _read_again(server: Server) -> Totals:
    """A reading; the server may miss a single call."""
    try:
        return server.read()
    except TopError:
        time.sleep(1.0)
        return server.read()


def _check_rich() -> None:
    try:
        import rich  # noqa: F401
    except ImportError:
        raise TopError("rich is not installed: pip install 'sglang-sparse[top]', or use --once --json") from None


if __name__ == "__main__":
    sys.exit(main())
