"""``python -m sglang_sparse.evaluate ruler | needle | compare``; ``--help`` after each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_sparse.evaluate.command_line import Parser, positive
from sglang_sparse.evaluate.files import EvaluationError
from sglang_sparse.evaluate.lm_eval_parts import go_offline
from sglang_sparse.files import FileError


def parser() -> argparse.ArgumentParser:
    from sglang_sparse.evaluate import compare, needle, ruler

    top = Parser(prog="python -m sglang_sparse.evaluate", description="Long-context evaluation of a running server.")
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser)
    for name, module, lengths, what in (
        ("ruler", ruler, [4096, 8192, 16384, 30000], "lm-eval's RULER tasks that need no network"),
        ("needle", needle, [4096, 8192, 16384, 30000], "a fact in a long text, over depths and lengths"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--base-url", metavar="URL", help="such as http://127.0.0.1:30000")
        command.add_argument("--model", help="default: the first in the server's /v1/models")
        command.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="the model's folder, or its tokenizer's")
        command.add_argument(
            "--lengths", type=positive, nargs="+", default=lengths, metavar="TOKENS", help="answer included"
        )
        command.add_argument("--concurrency", type=positive, default=16, help="requests at once (default 16)")
        command.add_argument("--timeout", type=positive, default=1800, metavar="SECONDS", help="of a request")
        command.add_argument(
            "--context", type=positive, metavar="TOKENS", help="if the server does not say it, or less"
        )
        command.add_argument("--out", type=Path, metavar="FILE.json")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    command = commands.add_parser("compare", help="is the second run significantly worse than the first?")
    command.add_argument("dense", type=Path, help="result file of ruler or needle")
    command.add_argument("sparse", type=Path, help="result file over the same samples")
    command.set_defaults(run=compare.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    go_offline()
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (EvaluationError, FileError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted, nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
